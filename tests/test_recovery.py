"""The trainer's checkpoints: written beside the steps, counted when they are on disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.config import StalenessSettings, TrainerSettings
from pipeline.errors import CheckpointError
from pipeline.keys import Keys
from pipeline.learner import ScriptedLearner
from pipeline.metrics import Metrics
from pipeline.prompts import PromptStatistics
from pipeline.run.recovery import Recovery, TrainerState
from pipeline.run.resumption import run_checkpoints
from pipeline.settings.files import fingerprint, load_config
from pipeline.wire import encode
from pipeline.worker.arrival import Arrival
from pipeline.worker.context import WorkerContext
from pipeline.worker.state import WorkerState
from tests.groups import make_prompt


class SlowLearner(ScriptedLearner):
    """Its copies are written when `may_write` is set, or fail with `problem`."""

    def __init__(self) -> None:
        super().__init__(TrainerSettings(), StalenessSettings())
        self.may_write, self.problem = threading.Event(), ""

    def snapshot(self) -> Any:
        outer = self

        class Copy(ScriptedLearner):
            def save_model(self, directory: Path) -> None:
                assert outer.may_write.wait(60)
                if outer.problem:
                    raise OSError(outer.problem)
                super().save_model(directory)

        copied = Copy(TrainerSettings(), StalenessSettings())
        copied.load_state_dict(self.state_dict())
        return copied


@pytest.fixture
async def context(tmp_path: Path, valkey_url: str, keys: Keys, redis: Redis) -> WorkerContext:
    """A trainer that has arrived at its run, and has the right to train."""
    words = [f"run.name='{keys.run}'", f"run.dir='{tmp_path}'", f"redis.url='{valkey_url}'"]
    config = load_config([], environ={}, overrides=[*words, "generation.engine='scripted'"])
    state = WorkerState("trainer", "trainer-a")
    arrived = await Arrival(config, state, Metrics(keys.run, "trainer", "trainer-a"), "", joins=True).enter(redis)
    assert arrived is not None
    return arrived


async def trained(redis: Redis, keys: Keys, *group_ids: str) -> None:
    """As if a step with these groups had been counted."""
    for group_id in group_ids:
        await redis.hset(keys.uncommitted, group_id, b"prompt")  # type: ignore[misc]


async def test_training_goes_on_while_a_checkpoint_is_written_and_its_groups_are_committed_after(
    context: WorkerContext, redis: Redis, keys: Keys
) -> None:
    recovery, learner = Recovery(context), SlowLearner()
    assert await recovery.become_the_trainer()
    await trained(redis, keys, "a", "b")
    state = TrainerState(step=0, version=0, cursor=0).after_step(["a", "b"])
    tasks: list[asyncio.Task[None]] = []

    def start(work: Any) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    state = await recovery.save(learner, state, PromptStatistics(1), start=start)
    # It has only been copied: a step is done, and counts for the next checkpoint.
    state = state.after_step(["c"])
    await trained(redis, keys, "c")
    assert not tasks[0].done()
    assert await redis.hlen(keys.uncommitted) == 3  # type: ignore[misc]

    following = asyncio.create_task(recovery.save(learner, state, PromptStatistics(1), start=start))
    done, _ = await asyncio.wait([following], timeout=0.2)
    assert not done, "the next one waits for the one before"
    learner.may_write.set()
    state = await following
    await asyncio.gather(*tasks)
    state = await recovery.save_last(learner, state, PromptStatistics(1))
    assert state.uncommitted == ()
    assert await redis.hlen(keys.uncommitted) == 0  # type: ignore[misc]
    folder = context.config.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000001", "step_000002"]


async def test_groups_of_a_checkpoint_that_failed_go_into_the_next(
    context: WorkerContext, redis: Redis, keys: Keys
) -> None:
    recovery, learner = Recovery(context), SlowLearner()
    assert await recovery.become_the_trainer()
    await trained(redis, keys, "a", "b")
    learner.may_write.set()
    learner.problem = "No space left on device"
    state = TrainerState(step=0, version=0, cursor=0).after_step(["a"])
    state = await recovery.save(learner, state, PromptStatistics(1), start=asyncio.create_task)
    state = await recovery.save_last(
        ScriptedLearner(TrainerSettings(), StalenessSettings()), state.after_step(["b"]), PromptStatistics(1)
    )
    assert await redis.hlen(keys.uncommitted) == 0  # type: ignore[misc]
    with pytest.raises(CheckpointError):
        await recovery.save_last(
            _Failing(TrainerSettings(), StalenessSettings()), state.after_step(["c"]), PromptStatistics(1)
        )


class _Failing(ScriptedLearner):
    def save_model(self, directory: Path) -> None:
        raise OSError("the disk is gone")


async def test_a_checkpoint_knows_of_the_prompts_what_was_known_when_it_was_copied(
    context: WorkerContext, redis: Redis, keys: Keys
) -> None:
    recovery, learner, known = Recovery(context), SlowLearner(), PromptStatistics(8)
    assert await recovery.become_the_trainer()
    known.observe(3, 0.5, 1)
    state = TrainerState(step=0, version=0, cursor=0).after_step(["a"])
    tasks: list[asyncio.Task[None]] = []

    def start(work: Any) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    await recovery.save(learner, state, known, start=start)
    known.observe(3, 1.0, 2)
    learner.may_write.set()
    await asyncio.gather(*tasks)

    restored, successor = PromptStatistics(8), Recovery(context)
    assert await successor.become_the_trainer()
    await successor.restore(ScriptedLearner(TrainerSettings(), StalenessSettings()), restored)
    assert restored.of_row(3) == (1, 0.5, 1)
    assert restored.coverage().seen == 1


async def test_a_checkpoint_that_the_trainer_before_completes_at_the_last_moment_is_gone_on_from(
    context: WorkerContext, redis: Redis, keys: Keys
) -> None:
    before = run_checkpoints(context.config)
    before.take_over()
    state = {"step": 8, "version": 8, "cursor": 16, "settings": dict(fingerprint(context.config))}

    class Late(Recovery):
        def _compare_settings(self) -> None:
            before.save(8, learner=SlowLearner(), state={**state, "committed": ["a", "b"]})
            super()._compare_settings()

    await trained(redis, keys, "a", "b")
    recovery = Late(context)
    assert await recovery.become_the_trainer()
    restored = await recovery.restore(SlowLearner(), PromptStatistics(1))
    assert (restored.step, restored.version) == (8, 9)
    assert await recovery.lost_groups() == []
    assert await redis.hlen(keys.uncommitted) == 0  # type: ignore[misc]


async def test_an_uncommitted_group_that_cannot_be_read_is_set_aside_and_the_others_are_fed_again(
    context: WorkerContext, redis: Redis, keys: Keys
) -> None:
    recovery = Recovery(context)
    assert await recovery.become_the_trainer()
    await trained(redis, keys, "broken", "whole")
    await redis.hset(keys.uncommitted, "whole", encode(make_prompt(7)))  # type: ignore[misc]
    await redis.hset(keys.ledger, mapping={"fed": 2, "trained": 2})  # type: ignore[misc]
    assert [group.ordinal for group in await recovery.lost_groups()] == [7]
    (letter,) = await context.streams.dead_letters()
    assert (letter.group_id, letter.payload) == ("broken", b"prompt")
    assert "msgpack" in letter.reason
    ledger = await context.streams.ledger()
    assert ledger.balances
    assert (ledger.trained, ledger.uncommitted, ledger.dead) == (1, 1, 1)
