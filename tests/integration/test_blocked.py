"""A run in which nothing moves: status, and so the exporter's log and alert, name the stage that blocks and why.

Scenario E8. What decides is tried here on real faults; when it is said and sounded is in tests/test_exporter.py and
tests/deploy/test_watching.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.keys import Keys
from pipeline.run import limits
from pipeline.run.limits import Limit
from pipeline.run.status import collect
from tests.answering import answering
from tests.deploy.servers import reserved_port
from tests.integration.harness import SCRIPTED, Run, running
from tests.integration.test_stages import by_length, half

ENDLESS = (*SCRIPTED, "trainer.max_steps=1000000", "trainer.scripted_step_s=0.05")
HANGS = "scoring.rewards=[{function='tests.integration.rewards:hangs_at_times',timeout_s=600}]"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks here takes a stand of three seconds for a long one."""
    monkeypatch.setattr(limits, "_STALLED_AFTER_S", 3.0)


async def blocked(run: Run, stage: str, why: str = "") -> Limit:
    """What is said once the run is blocked by that stage, for such a reason, while all other workers are there."""
    seen: list[Limit] = []

    async def is_blocked() -> bool:
        seen.append((await collect(run.redis, Keys(run.config.run.name))).limit)
        return seen[-1].is_blocked and seen[-1].stage == stage and why in seen[-1].reason

    await run.until(is_blocked, f"a run that is blocked by: {stage} {why}")
    return seen[-1]


async def test_a_stage_whose_workers_all_stand_still_is_named_and_the_run_goes_on_when_they_do(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *ENDLESS) as run:
        run.start_all(generators=2)
        await run.until_steps(2)
        for role in ("generator", "scorer", "trainer"):
            stopped = [worker for worker in run.workers if worker.role == role]
            for worker in stopped:
                worker.signal(signal.SIGSTOP)
            # On a busy machine nothing may have moved for long before.
            found = await blocked(run, role, f"no {role} is alive ({len(stopped)} lost)")
            assert found.reason.startswith("no ")
            for worker in stopped:
                worker.signal(signal.SIGCONT)
            await run.until_steps(run.num_steps + 2)
        await run.fleet.stop("the test is over")
        await run.until_over()


async def test_a_reward_that_hangs_is_named_with_how_long(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    async with running(tmp_path, valkey_url, run_name, *ENDLESS, HANGS) as run:
        run.start_all()
        await run.until_ready(*run.workers)
        found = await blocked(run, "scorer", "hangs_at_times has not returned for")
        assert "the scorer stage holds" in found.reason


async def test_weights_that_do_not_arrive_are_named(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    async with running(tmp_path, valkey_url, run_name, *ENDLESS, "weights.own_process='always'") as run:
        trainer = run.start_all(generators=2)
        await run.until_steps(2)
        (serving,) = psutil.Process(trainer.pid).children()
        serving.suspend()
        await blocked(run, "weights", "wait for weights of version")
        serving.resume()
        await run.until_steps(run.num_steps + 2)
        await run.fleet.stop("the test is over")
        await run.until_over()


@pytest.fixture
def two_ports() -> Iterator[tuple[int, int]]:
    with reserved_port() as one, reserved_port() as other:
        yield one, other


async def test_a_server_of_models_that_is_away_is_named_and_groups_wait_for_it(
    tmp_path: Path, valkey_url: str, run_name: str, two_ports: tuple[int, int]
) -> None:
    """At the start, and when it goes in the middle of a run."""
    ports = dict(zip(("teacher", "judge"), two_ports, strict=True))
    models = [f"scoring.{role}s=[{{model='tiny',url='http://127.0.0.1:{port}'}}]" for role, port in ports.items()]
    async with running(tmp_path, valkey_url, run_name, *ENDLESS, *models, "algorithm.distillation_coef=0.5") as run:
        for role in ports:
            run.start(role)
        run.start_all()

        async def is_named(role: str) -> None:
            await blocked(run, role, f"the {role} waits for a server (scoring.{role}s[0].url = ")

        await is_named("teacher")
        with answering(half, port=ports["teacher"]):
            await is_named("judge")
            with answering(by_length, port=ports["judge"]):
                await run.until_steps(2)
            await is_named("judge")
        with answering(by_length, port=ports["judge"]):
            await is_named("teacher")
            with answering(half, port=ports["teacher"]):
                await run.until_steps(run.num_steps + 2)
                await run.fleet.stop("the test is over")
                await run.until_over()
        assert ((await run.ledger()).dead, (await run.ledger()).num_dropped) == (0, 0)
        assert not [worker.tail for worker in run.workers if "Traceback" in worker.output]
