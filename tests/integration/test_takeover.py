"""Workers that are killed or stalled while they hold groups: others take over, nothing is lost or trained twice.

Scenarios Q2, Q3, Q4 and E4.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.keys import Stream
from tests.integration.harness import SCRIPTED, Run, running
from tests.integration.processes import Worker

# A group takes half a second in a generator and in a scorer: there is often one to be caught with.
SLOW = (
    *SCRIPTED,
    "generation.scripted.tokens_per_s=32",
    "generation.max_num_seqs=16",
    "staleness.max_staleness=4",
    "scoring.rewards=[{function='tests.integration.rewards:slow'}]",
    "scoring.num_processes=2",
    "queues.lease_s=4.0",  # long beside what a busy machine adds
)


async def stopped_while_they_hold_groups(run: Run, workers: Sequence[Worker]) -> list[str]:
    """Stop these workers (SIGSTOP) at a moment when each has groups in its hands; returns their ids."""
    ids = [info.worker_id for info in await run.until_ready(*workers)]

    async def all_hold_some() -> bool:
        return all([await run.num_held(worker_id) > 0 for worker_id in ids])

    await run.until_stopped(workers, all_hold_some, "workers that hold groups")
    return ids


async def until_they_hold_nothing(run: Run, worker_ids: Sequence[str]) -> None:
    """Wait until others have taken over all that these workers held."""

    async def are_free() -> bool:
        return sum([await run.num_held(worker_id) for worker_id in worker_ids]) == 0

    await run.until(are_free, f"takeover of what {worker_ids} held")


def each_once(run: Run, groups: int) -> None:
    """Groups 0 to `groups` - 1 were trained, each once."""
    assert dict(run.times_trained) == {f"{ordinal:08d}": 1 for ordinal in range(groups)}


async def test_groups_of_killed_and_stalled_workers_are_taken_over_and_trained_once(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SLOW, "trainer.max_steps=30") as run:
        generators = [run.start("generator") for _ in range(2)]
        scorers = [run.start("scorer") for _ in range(2)]
        # These two stay, with room for all that the others leave.
        run.start("generator", "generation.max_num_seqs=64")
        run.start("scorer", "scoring.num_processes=6")
        run.start("trainer")
        doomed, stalled = (generators[0], scorers[0]), (generators[1], scorers[1])
        ids = await stopped_while_they_hold_groups(run, [*doomed, *stalled])
        for worker in doomed:
            worker.kill()
        await until_they_hold_nothing(run, ids)

        # Those that were only stalled come too late with their results.
        refused = (await run.ledger()).refused
        for worker in stalled:
            worker.signal(signal.SIGCONT)
        for worker in stalled:
            await run.until(partial(worker.events_named, "late_result_refused"), f"a late result of a {worker.role}")
            assert await run.metric(worker, "rollstream_refused_total") > 0
        generator = stalled[0]
        assert await run.metric(generator, "rollstream_tokens_wasted_total", reason="refused") > 0
        assert (await run.ledger()).refused >= refused + 2
        await run.until_over()
        ledger = await run.ledger()
        assert (ledger.fed, ledger.trained, ledger.dead, ledger.num_dropped) == (120, 120, 0, 0)
        each_once(run, 120)


async def test_streams_stay_within_admission_while_the_trainer_stands_still(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = ("trainer.scripted_step_s=0.2", "trainer.max_steps=20")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all(generators=2)
        generators = run.workers[:2]
        await run.until_steps(1)
        trainer.signal(signal.SIGSTOP)

        async def only_scored_groups_are_left() -> bool:
            assert await run.num_in_streams() <= run.config.admission_limit
            depths = await run.streams.depths()
            return depths[Stream.PROMPTS].length == depths[Stream.ROLLOUTS].length == 0

        await run.until(only_scored_groups_are_left, "generators and scorers to finish what was fed")
        await run.until(lambda: lock_is_gone(run), "the trainer's lock to expire")
        await until_idle(run, generators)
        live = (await run.ledger()).live
        assert 0 < live <= run.config.admission_limit
        trainer.signal(signal.SIGCONT)
        await run.until_over()
        assert (await run.ledger()).trained == 80
        each_once(run, 80)


async def lock_is_gone(run: Run) -> bool:
    """Whether no trainer holds the run."""
    return (await run.fleet.facts()).trainer is None


async def until_idle(run: Run, generators: Sequence[Worker]) -> None:
    """Wait until all generators say that there is nothing to generate from."""

    async def idle() -> bool:
        infos = [await run.info(worker) for worker in generators]
        return all(info is not None and "prompts" in str(info.status["waiting_for"]) for info in infos)

    await run.until(idle, "idle generators")
