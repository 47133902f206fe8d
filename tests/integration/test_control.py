"""What people ask of a run while it goes on: pause, resume, drain, and an end in which everyone leaves."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.integration.harness import SCRIPTED, Run, running

IDLE = "rollstream_idle_seconds_total"
ENDLESS = (*SCRIPTED, "trainer.max_steps=100000", "trainer.scripted_step_s=0.05")


async def until_state(run: Run, *states: str) -> None:
    """Wait until every worker says one of these words of itself."""

    async def all_say() -> bool:
        return all(info.status["state"] in states for info in await run.fleet.workers())

    await run.until(all_say, f"workers in state {' or '.join(states)}")


async def test_a_paused_run_keeps_all_groups_and_goes_on_where_it_was(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *ENDLESS) as run:
        run.start_all(generators=2)
        await run.until_steps(2)
        assert (await run.command("pause")).code == 0
        await until_state(run, "paused")
        steps = run.num_steps

        async def nothing_is_in_work() -> bool:
            infos = await run.fleet.workers()
            return sum([await run.num_held(info.worker_id) for info in infos if info.role != "trainer"]) == 0

        async def all_stand_still() -> bool:
            # One that was waiting for groups when the word came turns only when that wait ends. The
            # trainer may wait for groups all the time.
            paused = [await run.metric(worker, IDLE, cause="paused") for worker in run.workers[:3]]
            return min(paused) > 0

        await run.until(nothing_is_in_work, "work in flight to end")
        await run.until(all_stand_still, "everyone to count the pause")
        assert run.num_steps <= steps + 1
        before = await run.ledger()
        assert before.live > 0
        assert (await run.command("resume")).code == 0
        # Each was trained once, those included that the pause found on their way.
        await run.until(lambda: len(run.times_trained) > before.fed, "groups that were fed after the pause")
        assert set(run.times_trained.values()) == {1}
        await run.fleet.stop("the test is over")
        await run.until_over()


async def test_drained_workers_hand_back_what_they_hold_and_others_go_on(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    # A busy machine keeps a trainer silent for a second, and the one that waits is not to take over.
    settings = (*ENDLESS, "worker.heartbeat_s=1.5", "queues.lease_s=10")
    async with running(tmp_path, valkey_url, run_name, *settings) as run:
        trainer = run.start_all(generators=2, scorers=2)
        one, other, scorer, other_scorer = run.workers[:4]
        (info,) = await run.until_ready(scorer)
        await run.until_steps(1)
        assert (await run.command("drain", info.worker_id)).out == f"draining {info.worker_id}\n"
        assert await run.until_exit(scorer) == [0]
        await run.until_steps(run.num_steps + 2)

        # A trainer that waits for the run to be free leaves when asked to.
        spare = run.start("trainer")
        await run.until(lambda: "another trainer" in spare.output, "a second trainer that waits")
        said, *_ = spare.events_named("another_trainer")
        assert said["holder"] == (await run.fleet.facts()).trainer
        assert "trains nothing meanwhile" in str(said["this_one"])
        assert f"rollstream drain {said['holder']}" in str(said["way_out"])
        assert 0 < float(str(said["free_within_s"])) <= run.config.queues.lease_s
        spare.signal(signal.SIGTERM)
        assert await run.until_exit(spare) == [0]

        # A drained trainer writes a checkpoint, and its successor goes on from it.
        assert (await run.command("drain", "trainer")).code == 0
        assert (await run.until_exit(trainer)) == [0]
        assert (await run.ledger()).uncommitted == 0
        last = run.num_steps
        successor = run.start("trainer")
        await run.until_steps(last + 2)
        assert successor.events_named("resumed")[0]["step"] == last
        assert set(run.times_trained.values()) == {1}
        assert [row["step"] for row in run.steps[: last + 2]] == list(range(1, last + 3))
        await run.fleet.stop("the test is over")
        await run.until_over()
        assert (await run.ledger()).live > 0
        assert all([await run.num_held(worker.worker_id) == 0 for worker in await run.fleet.workers()])
        assert [one.code, other.code, other_scorer.code] == [0, 0, 0]
