"""A run is stopped, in every order of its workers: each is gone in time, and what is left goes on later.

Also the end that a run comes to by itself, whoever is missing then.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path

import pytest

from tests.integration.harness import SCRIPTED, Run, running

ROLES = ("generator", "scorer", "trainer")
NUM_STEPS = 6
SETTINGS = (*SCRIPTED, f"trainer.max_steps={NUM_STEPS}", "trainer.scripted_step_s=0.1", "checkpoint.every_steps=2")


def each_once(run: Run) -> None:
    """All groups of all steps, each once."""
    assert dict(run.times_trained) == {f"{ordinal:08d}": 1 for ordinal in range(4 * NUM_STEPS)}


async def start_again(run: Run) -> None:
    """The trainer last: where it had done its last step when it was stopped, it says so to those who are there, and
    whoever comes later waits for another trainer."""
    others = {run.start(role).pid for role in ("generator", "scorer")}

    async def are_there() -> bool:
        return others <= {info.pid for info in await run.fleet.workers()}

    await run.until(are_there, "generator and scorer in the registry")
    run.start("trainer")


async def test_workers_that_are_stopped_in_any_order_exit_with_0_and_the_run_goes_on_where_it_was(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async def stop_in(order: tuple[str, ...]) -> None:
        async with running(tmp_path, valkey_url, f"{run_name}-{'-'.join(order)}", *SETTINGS) as run:
            run.start_all()
            await run.until_steps(1)
            for role in order:
                (worker,) = [worker for worker in run.workers if worker.role == role]
                if worker.code is None:  # or the run was over before
                    worker.signal(signal.SIGTERM)
                # 0, not 4: within worker.drain_timeout_s.
                assert await run.until_exit(worker) == [0]
            assert await run.fleet.workers() == []
            assert sum(depth.pending for depth in (await run.streams.depths()).values()) == 0
            await start_again(run)
            await run.until_over()
            ledger = await run.ledger()
            assert (ledger.trained, ledger.uncommitted, ledger.dead) == (4 * NUM_STEPS, 0, 0)
            each_once(run)

    await asyncio.gather(*map(stop_in, itertools.permutations(ROLES)))


@pytest.mark.parametrize("missing", ["generator", "scorer"])
async def test_a_run_ends_whoever_is_missing_at_its_end(
    tmp_path: Path, valkey_url: str, run_name: str, missing: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS) as run:
        run.start_all(generators=2, scorers=2)

        async def are_waiting_to_be_trained() -> bool:
            return (await run.ledger()).fed == 4 * NUM_STEPS and run.num_steps >= NUM_STEPS - 3

        await run.until(are_waiting_to_be_trained, "the last groups to be fed")
        for worker in [worker for worker in run.workers if worker.role == missing][:1]:
            worker.kill()
        await run.until_over()
        assert (await run.ledger()).live == 0
        each_once(run)
