"""Generation and training that take turns on one device: never both at once, and nothing is lost over it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.keys import Keys, Stream
from pipeline.messages import RolloutGroup
from pipeline.wire import decode
from tests.integration.harness import Run, running
from tests.integration.turns import Turns, assert_apart, turns_of
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 140.0  # four processes load torch first, which is slow on a busy machine


def settings(directory: Path, **changes: object) -> list[str]:
    make_tiny_model(directory / "model")
    rows = [json.dumps({"prompt": word}) for word in ("abc", "hello", "x", "reverse this", "a b", "zz9")]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return [
        "run.topology='colocated'",
        f"model.path={json.dumps(str(directory / 'model'))}",
        f"data.path={json.dumps(str(directory / 'prompts.jsonl'))}",
        "generation.group_size=4",
        "generation.max_tokens=100",
        "generation.temperature=0.6",
        "generation.max_num_seqs=12",
        "generation.num_threads=1",
        "scoring.rewards=[{function='tests.integration.rewards:vowels'}]",
        "scoring.num_processes=1",
        "staleness.max_staleness=3",
        "trainer.groups_per_step=3",
        "trainer.max_steps=8",
        "trainer.learning_rate=0.001",
        "trainer.num_threads=1",
        "checkpoint.every_steps=0",
        "queues.lease_s=2.0",
        "worker.heartbeat_s=0.3",
        "worker.log_format='json'",
        "worker.log_level='debug'",
        "tracking.samples_per_step=1000",
        *(f"{name}={value}" for name, value in changes.items()),
    ]


async def watch(run: Run, seen: list[RolloutGroup]) -> None:
    """Every rollout that is handed over, for ever."""
    name = Keys(run.config.run.name).stream(Stream.ROLLOUTS)
    last: Any = "0-0"
    while True:
        found: Any = await run.redis.xread({name: last}, block=200)
        for _, entries in found:
            last = entries[-1][0]
            seen += [decode(fields[b"payload"], RolloutGroup) for _, fields in entries]


def assert_made_in(turns: Turns, rollouts: Sequence[RolloutGroup]) -> None:
    for rollout in rollouts:
        assert any(start <= rollout.hops["generated"] <= end for start, end in turns), rollout.hops


async def test_the_two_are_never_active_at_once_and_the_run_completes(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    # One group at a time of the twelve that wait: the fourth is in flight when three are scored, however slowly.
    one_by_one = settings(tmp_path, **{"generation.max_num_seqs": 4})
    async with running(tmp_path, valkey_url, run_name, *one_by_one) as run:
        rollouts: list[RolloutGroup] = []
        watching = asyncio.create_task(watch(run, rollouts))
        trainer, generator = run.start("trainer"), run.start("generator")
        run.start("scorer")
        await run.until_over(deadline_s=DEADLINE_S)
        watching.cancel()
        ledger = await run.ledger()
        assert (ledger.trained, ledger.live) == (24, 0)
        assert len(rollouts) >= 24
        training, generating = turns_of(trainer), turns_of(generator)
        assert len(training) == 1 + 8, "once to load, and for every step"
        assert len(generating) >= 3
        assert_apart([*training, *generating])
        assert_made_in(generating, rollouts)
        assert any(len(item["versions"]) == 2 for sample in run.samples for item in sample["completions"]), (
            "no sequence was in flight when the trainer took the device"
        )


async def test_generators_take_turns_too_and_one_that_dies_with_the_device_loses_it(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *settings(tmp_path)) as run:
        trainer, *generators = run.start("trainer"), run.start("generator"), run.start("generator")
        run.start("scorer")
        await run.until_steps(2, deadline_s=DEADLINE_S)
        holder = str(await run.redis.get(Keys(run_name).device_turn))
        infos = [await run.info(worker) for worker in generators]
        killed = next((i for i, info in enumerate(infos) if info and info.worker_id in holder), 0)
        generators[killed].kill()
        assert await run.until_exit(trainer, deadline_s=DEADLINE_S) == [0]
        ledger = await run.ledger()
        assert ledger.trained == 24
        assert max(run.times_trained.values()) == 1
        assert_apart([*turns_of(trainer), *turns_of(generators[1 - killed])])
