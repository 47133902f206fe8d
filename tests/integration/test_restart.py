"""A trainer that is killed and started again: every group's effect is in the surviving weights once.

Scenarios Q2 (trainer) and S6.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import psutil

from pipeline.checkpoints import Checkpoints
from pipeline.keys import Keys
from tests.integration.harness import SCRIPTED, running
from tests.integration.lives import (
    killed_between_checkpoints,
    newest_checkpoint,
    newest_version,
    surviving,
    versions_of,
)

NUM_STEPS = 18
NUM_GROUPS = 4 * NUM_STEPS
SETTINGS = (
    *SCRIPTED,
    "trainer.scripted_step_s=0.2",
    f"trainer.max_steps={NUM_STEPS}",
    "checkpoint.every_steps=3",
    "checkpoint.keep=10",
    "queues.lease_s=1.0",
)


async def test_a_trainer_killed_in_mid_step_is_followed_by_one_that_feeds_again_what_no_checkpoint_holds(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS) as run:
        doomed = run.start_all(generators=2)
        saved_step = await killed_between_checkpoints(run, doomed)
        version = await newest_version(run)
        num_before = len(run.samples)
        successor = run.start("trainer")
        await run.until(lambda: successor.events_named("resumed") != [], "a trainer that resumes")
        (resumed,) = successor.events_named("resumed")
        assert resumed["step"] == saved_step
        assert resumed["weight_version"] == version + 1
        await run.until_over()
        ledger = await run.ledger()
        assert (ledger.fed, ledger.trained, ledger.uncommitted, ledger.live) == (NUM_GROUPS, NUM_GROUPS, 0, 0)
        assert Counter(sample["group_id"] for sample in surviving(run)) == {f"{i:08d}": 1 for i in range(NUM_GROUPS)}
        # Generators came over without a restart, to weights whose number nobody had before.
        assert max(versions_of(run.samples[num_before:])) > version
        num_left = NUM_STEPS - saved_step
        assert [row["weight_version"] for row in run.steps[-num_left:]] == [version + 2 + i for i in range(num_left)]
        assert all(row["staleness_max"] >= 0 for row in run.steps)


async def test_a_trainer_waits_for_one_that_is_gone_and_says_so(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS, "trainer.max_steps=1") as run:
        assert await run.fleet.acquire_trainer("trainer-that-died", 600.0)
        trainer = run.start_all()
        await run.until(lambda: trainer.events_named("another_trainer") != [], "word of the one before")
        (said,) = trainer.events_named("another_trainer")
        assert (said["holder"], said["state"]) == ("trainer-that-died", "gone without a word")
        assert "when the lock of that one lapses" in str(said["this_one"])
        await run.redis.pexpire(Keys(run_name).trainer_lock, 1)
        await run.until_over()
        assert run.num_steps == 1


async def test_a_trainer_that_died_between_checkpoint_and_count_trains_nothing_twice(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS) as run:
        doomed = run.start_all()
        seen: dict[str, bytes] = {}

        def of_the_checkpoint() -> dict[str, bytes]:
            saved = newest_checkpoint(run)
            committed = saved.state["committed"] if saved is not None else []
            return {group_id: seen[group_id] for group_id in committed if group_id in seen}

        async def holds_some_that_were_uncommitted() -> bool:
            seen.update(await run.streams.uncommitted())
            return bool(of_the_checkpoint())

        await run.until_stopped([doomed], holds_some_that_were_uncommitted, "a checkpoint of groups that were seen")
        doomed.kill()
        payloads = of_the_checkpoint()
        # As if it had died a moment earlier: the checkpoint is there, and Redis does not know.
        await run.redis.hset(Keys(run_name).uncommitted, mapping=dict(payloads))
        run.start("trainer")
        await run.until_over()
        assert (await run.ledger()).uncommitted == 0
        # It may have done a step more before it was killed, which is in no weights that are left.
        states = [json.loads(path.read_text()) for path in run.config.run_dir.glob("checkpoints/step_*/state.json")]
        times_committed = Counter(group_id for state in states for group_id in state["committed"])
        assert payloads.keys() <= times_committed.keys()
        assert set(times_committed.values()) == {1}


async def test_a_trainer_that_was_replaced_while_it_stood_still_writes_nothing_any_more(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS) as run:
        stalled = run.start_all()
        stalled.may_fail = True
        await run.until_steps(4)
        stalled.signal(signal.SIGSTOP)
        successor = run.start("trainer")
        assert await run.until_exit(successor) == [0]
        checkpoints = Checkpoints(run.config.run_dir / "checkpoints", run.config.checkpoint)
        before = [checkpoint.step for checkpoint in checkpoints.list()]
        stalled.signal(signal.SIGCONT)
        assert await run.until_exit(stalled) == [1]
        (last,) = stalled.events_named("worker_failed")
        assert "took the run over" in str(last["error"])
        assert [checkpoint.step for checkpoint in checkpoints.list()] == before
        assert before[-1] == NUM_STEPS


async def test_versions_go_on_rising_when_redis_lost_the_run_while_there_was_no_trainer(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS) as run:
        saved_step = await killed_between_checkpoints(run, run.start_all())
        version = await newest_version(run)
        await run.redis.unlink(*[key async for key in run.redis.scan_iter(match=Keys(run_name).pattern)])
        successor = run.start("trainer")
        await run.until(lambda: successor.events_named("resumed") != [], "a trainer that resumes")
        (resumed,) = successor.events_named("resumed")
        assert (resumed["step"], resumed["weight_version"]) == (saved_step, version + 1)
        assert len(successor.events_named("run_lost")) == 1
        await run.until_over()
        assert (await run.ledger()).dead == 0


async def test_a_trainer_that_saw_redis_lose_the_run_is_followed_by_one_that_knows_it_again(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS, "trainer.max_steps=100000") as run:
        doomed = run.start_all()
        await run.until_steps(4)
        identity = run.config.run_dir / "run.json"
        before = json.loads(identity.read_text())
        # As FLUSHALL would, on a server that other tests use as well.
        await run.redis.unlink(*[key async for key in run.redis.scan_iter(match=Keys(run_name).pattern)])

        def is_introduced() -> bool:
            return bool(json.loads(identity.read_text())["run_id"] != before["run_id"])

        await run.until(is_introduced, "a trainer that remembers the new run")
        await run.until_steps(run.num_steps + 3)
        facts = await run.fleet.facts()
        remembered = json.loads(identity.read_text())
        assert remembered["run_id"] == facts.run_id
        assert remembered["weight_version"] >= (facts.weight_version or 0) > before["weight_version"]
        doomed.kill()
        newest, saved = await newest_version(run), newest_checkpoint(run)
        assert saved is not None
        successor = run.start("trainer", f"trainer.max_steps={saved.step + 3}")
        await run.until(lambda: successor.events_named("resumed") != [], "a trainer that resumes")
        (resumed,) = successor.events_named("resumed")
        assert resumed["weight_version"] == newest + 1
        await run.until_over()
        versions = [row["weight_version"] for row in run.steps]
        assert versions == sorted(set(versions)), "no number was used twice"
        assert (await run.ledger()).dead == 0


async def test_a_checkpoint_of_other_settings_is_refused_after_a_reset(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS, "trainer.max_steps=3") as run:
        run.start_all()
        await run.until_over()
        await run.fleet.forget_run()
        trainer = run.start("trainer", "generation.group_size=2", may_fail=True)
        assert await run.until_exit(trainer) == [2]
        assert "generation.group_size = 2 here, 4 there" in trainer.output
        assert 'checkpoint.resume = "never"' in trainer.output
        assert (await run.fleet.facts()).run_id is None, "it did not join a run that is new with settings of its own"


async def test_a_trainer_of_a_run_that_is_over_loads_nothing_and_lets_those_go_who_wait_for_it(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS, "trainer.max_steps=2") as run:
        run.start_all()
        await run.until_over()
        version, records = await run.fleet.version(), run.metrics
        remembered = (run.config.run_dir / "run.json").read_text()
        (checkpoint,) = Checkpoints(run.config.run_dir / "checkpoints", run.config.checkpoint).list()
        waiting = [run.start("generator"), run.start("scorer")]
        await run.until_ready(waiting[1])
        await run.until(lambda: waiting[0].events_named("started") != [], "a generator")
        trainer = run.start("trainer")
        await run.until_over()
        (said,) = trainer.events_named("already_over")
        assert said["reason"] == "all 2 steps are done"
        assert "trainer.max_steps" in str(said["advice"])
        assert (await run.fleet.version(), run.metrics) == (version, records)
        assert (run.config.run_dir / "run.json").read_text() == remembered
        assert Checkpoints(run.config.run_dir / "checkpoints", run.config.checkpoint).list() == [checkpoint]
        assert (await run.fleet.facts()).stop_reason == "all 2 steps are done"


async def test_a_trainer_that_goes_on_with_other_settings_than_its_predecessor_names_them(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS) as run:
        doomed = run.start_all()
        await run.until_steps(2)
        assert doomed.events_named("settings_changed") == []
        doomed.kill()
        saved = newest_checkpoint(run)
        last = 2 + (saved.step if saved is not None else 0)
        successor = run.start("trainer", f"trainer.max_steps={last}", "checkpoint.keep=5")
        await run.until_over()
        (said,) = successor.events_named("settings_changed")
        assert said["level"] == "warning"
        steps = f"trainer.max_steps = {last} here, {NUM_STEPS} before"
        assert said["changed"] == f"{steps}; checkpoint.keep = 5 here, 10 before"
        assert run.num_steps == last


async def test_groups_for_which_no_step_is_left_are_live_and_said_and_trained_once_there_are_more_steps(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS) as run:
        saved_step = await killed_between_checkpoints(run, run.start_all())
        # There is one step to do, and what the one that was killed had fed and trained is for many.
        successor = run.start("trainer", f"trainer.max_steps={saved_step + 1}")
        await run.until_over()
        ledger, num_trained = await run.ledger(), 4 * (saved_step + 1)
        assert (ledger.trained, ledger.uncommitted) == (num_trained, 0)
        assert ledger.live == ledger.fed - num_trained > 0
        (said,) = successor.events_named("groups_left")
        assert said["num_groups"] == ledger.live
        last = run.start_all()
        await run.until_over()
        assert last.events_named("groups_left") == []
        ledger = await run.ledger()
        assert (ledger.fed, ledger.trained, ledger.uncommitted, ledger.live) == (NUM_GROUPS, NUM_GROUPS, 0, 0)
        assert Counter(sample["group_id"] for sample in surviving(run)) == {f"{i:08d}": 1 for i in range(NUM_GROUPS)}


async def test_a_trainer_that_is_drained_before_its_first_step_leaves_no_checkpoint_and_loses_nothing(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS, "trainer.max_steps=2") as run:
        first = run.start("trainer")
        await run.until_ready(first)
        first.signal(signal.SIGTERM)
        assert await run.until_exit(first) == [0]
        assert not list(run.config.run_dir.glob("checkpoints/step_*"))
        version = await run.fleet.version()
        assert version is not None
        run.start_all()
        await run.until_over()
        ledger = await run.ledger()
        assert (ledger.fed, ledger.trained, ledger.uncommitted, ledger.live) == (8, 8, 0, 0)
        assert [row["weight_version"] for row in run.steps] == [version + 2, version + 3]


async def test_a_trainer_whose_weights_nobody_serves_any_more_ends_and_is_followed_by_one_that_is_served(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SETTINGS, "weights.own_process='always'") as run:
        doomed = run.start_all()
        doomed.may_fail = True
        await run.until_steps(4)
        (serving,) = psutil.Process(doomed.pid).children()
        assert "pipeline.weights.serving" in serving.cmdline()
        serving.kill()
        assert await run.until_exit(doomed) == [1]
        run.start("trainer")
        await run.until_over()
        ledger = await run.ledger()
        assert (ledger.fed, ledger.trained, ledger.uncommitted, ledger.live) == (NUM_GROUPS, NUM_GROUPS, 0, 0)


async def test_checkpoints_that_cannot_be_written_are_counted_and_training_goes_on(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = ("trainer.max_steps=100000", "checkpoint.every_steps=2", "trainer.scripted_step_s=0.05")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all()
        await run.until_steps(1)
        in_the_way = run.config.run_dir / "checkpoints" / ".writing-step_000000"
        in_the_way.write_text("a file where a folder is to be removed")
        await run.until(lambda: len(trainer.events_named("checkpoint_failed")) >= 2, "two checkpoints that fail")
        await run.until_steps(run.num_steps + 2)
        assert await run.metric(trainer, "rollstream_checkpoint_failures_total") >= 2

        # Once they can be written, all that was trained is kept.
        before = run.num_steps
        in_the_way.unlink()

        async def is_written() -> bool:
            return await run.metric(trainer, "rollstream_checkpoint_step") > before

        await run.until(is_written, "a checkpoint")
        await run.fleet.stop("the test is over")
        await run.until_over()
        assert (await run.ledger()).uncommitted == 0
