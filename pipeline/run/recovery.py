"""What a trainer finds when it starts and leaves when it stops.

In: the newest checkpoint, and what Redis still knows of the run. Out: the state to go on from,
with a version that never goes backwards; groups trained into weights that were lost are fed
again. A run directory and a run in Redis that do not belong together are refused, never mixed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoints import Checkpoint, Savable
from pipeline.disk import write_whole
from pipeline.errors import CheckpointError, MessageError, RunConflictError
from pipeline.keys import Stream
from pipeline.learner import Learner
from pipeline.messages import Json, PromptGroup
from pipeline.prompts import PromptStatistics
from pipeline.run.predecessor import changed_settings, keep_settings
from pipeline.run.record import IDENTITY_FILE, read_identity
from pipeline.run.resumption import already_over, checkpoint_to_go_on_from, is_own, run_checkpoints
from pipeline.run.succession import take_the_run
from pipeline.settings.files import fingerprint
from pipeline.wire import decode
from pipeline.worker.lifecycle import WorkerContext

STATISTICS_FILE = "prompts.msgpack"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where training stands.

    step: optimiser steps done. version: of the current weights. cursor: ordinal of the next group
    to be fed. uncommitted: ids trained since the last checkpoint.
    """

    step: int
    version: int
    cursor: int
    uncommitted: tuple[str, ...] = ()

    def after_step(self, group_ids: Sequence[str]) -> TrainerState:
        """One more step, with these groups in it."""
        return dataclasses.replace(self, step=self.step + 1, uncommitted=(*self.uncommitted, *group_ids))

    def after_publish(self) -> TrainerState:
        """The next version."""
        return dataclasses.replace(self, version=self.version + 1)

    def without(self, committed: Collection[str]) -> TrainerState:
        """These groups' effect is in a checkpoint on disk."""
        left = tuple(group_id for group_id in self.uncommitted if group_id not in committed)
        return dataclasses.replace(self, uncommitted=left)

    def with_cursor(self, cursor: int) -> TrainerState:
        """Feeding goes on at `cursor`."""
        return dataclasses.replace(self, cursor=cursor)


class Recovery:
    """Claims the run for one trainer, restores it and saves it."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._checkpoints = run_checkpoints(context.config)
        self._checkpoint: Checkpoint | None = None
        self._identity_file = context.config.run_dir / IDENTITY_FILE
        self._saved_step: int | None = None
        self._writing: asyncio.Task[None] | None = None
        self._committed: frozenset[str] = frozenset()

    async def become_the_trainer(self) -> bool:
        """Wait until no other trainer holds the run; False when the worker drains before that, or the run is over.

        Raises RunConflictError for a foreign run, and for a checkpoint that was written with other settings.
        """
        context = self._context
        if not await take_the_run(context):
            return False
        context.keep_trainer_lock()
        await self._check_identity()
        self._checkpoint = await asyncio.to_thread(checkpoint_to_go_on_from, context.config)
        if ending := await asyncio.to_thread(already_over, context.config, self._checkpoint):
            context.log.info("already_over", reason=ending.reason, advice=ending.to_go_on)
            # Whoever was started to work for this trainer need not wait for it.
            await context.fleet.stop(ending.reason)
            return False
        await asyncio.to_thread(self._compare_settings)
        self.remember(0)
        await asyncio.to_thread(self._checkpoints.take_over)
        # Until now the trainer before this one could complete another, which counts.
        self._checkpoint = await asyncio.to_thread(checkpoint_to_go_on_from, context.config)
        return True

    async def _check_identity(self) -> None:
        """What was fed in Redis must have been fed by the run of this directory."""
        context, known = self._context, self._identity().get("run_id")
        if known == context.run_id:
            return
        ledger = await context.streams.ledger()
        if ledger.fed > 0 or ledger.eval_fed > 0:
            raise RunConflictError(
                f"run.name = {context.config.run.name!r}: Redis holds groups of another run of this name, not of "
                f"{context.config.run_dir}. To go on with it, bring its directory here from where its trainer was "
                f"(run.dir); else choose another run.name, or `rollstream reset --run {context.config.run.name}`"
            )
        if known is not None:
            kept = "weights, versions and the place in the data; groups that were in the streams are gone"
            context.log.warning("run_lost", reason="Redis does not know this run (any more)", kept=kept)

    def _compare_settings(self) -> None:
        """A trainer that goes on for another says in which settings it differs, and leaves its own for the next."""
        config, log = self._context.config, self._context.log
        goes_on = self._checkpoint is not None or self._identity().get("run_id") == self._context.run_id
        if goes_on and (changed := changed_settings(config)):
            log.warning("settings_changed", changed=changed, advice="where it is not meant: start it with theirs")
        try:
            keep_settings(config)
        except OSError as error:
            log.error("settings_not_kept", reason=str(error))

    def remember(self, version: int, **more: Json) -> None:
        """Keep on disk which run in Redis this directory belongs to, and the newest version it has used.

        Redis may come back without its data, and generators may be elsewhere; numbers that were
        used once are then still known.
        """
        identity = {
            "run": self._context.config.run.name,
            "run_id": self._context.run_id,
            "weight_version": max(version, self._last_version()),
            **more,
        }
        try:
            write_whole(self._identity_file, json.dumps(identity) + "\n")
        except OSError as error:
            self._context.log.error(
                "run_not_remembered",
                file=str(self._identity_file),
                reason=str(error),
                consequence="run goes on; its newest version is known to Redis alone",
            )

    async def conclude(self, version: int, ended: str | None) -> None:
        """Keep the accounts on disk, for when Redis is gone. ended: why the run is over; None when it may go on."""
        ledger = await self._context.streams.ledger()
        if ended and ledger.live:
            self._context.log.warning(
                "groups_left",
                num_groups=ledger.live,
                reason="they were fed, and there is no step left to train them in",
                way_out="raise trainer.max_steps to train them; else nothing is to be done",
            )
        self.remember(version, ended=ended, ledger=dataclasses.asdict(ledger))

    def _identity(self) -> dict[str, Any]:
        return read_identity(self._context.config.run_dir)

    def _last_version(self) -> int:
        version = self._identity().get("weight_version", 0)
        return version if isinstance(version, int) else 0

    async def restore(self, learner: Learner, statistics: PromptStatistics) -> TrainerState:
        """The state to go on from; learner and statistics are as they were then. After `become_the_trainer`."""
        context, checkpoint = self._context, self._checkpoint
        fed = (await context.streams.ledger()).next_ordinal
        state = TrainerState(step=0, version=0, cursor=fed)
        if checkpoint is not None:
            await asyncio.to_thread(checkpoint.verify)
            has_own = is_own(context.config, checkpoint)
            self._saved_step = checkpoint.step if has_own else None
            learner.load_state_dict(await asyncio.to_thread(checkpoint.learner_state))
            if (known := checkpoint.attached(STATISTICS_FILE)) is not None:
                statistics.restore(known)
            step, version, cursor = (_integer(checkpoint.state, name) for name in ("step", "version", "cursor"))
            state = TrainerState(step=step, version=version, cursor=max(fed, cursor))
            # The trainer may have died after writing it and before saying so.
            await context.streams.commit(_strings(checkpoint.state, "committed") if has_own else [])
        used = await self._newest_version()
        if checkpoint is not None or used is not None:
            state = dataclasses.replace(state, version=max(used or 0, state.version) + 1)
            context.log.info("resumed", step=state.step, weight_version=state.version, cursor=state.cursor)
        return state

    async def _newest_version(self) -> int | None:
        """The newest version that anyone knows of: Redis, this directory, or a worker; None before the first."""
        workers = await self._context.fleet.workers()
        served = [worker.status.get("weight_version") for worker in workers]
        known = [await self._context.fleet.version(), self._last_version() or None, *served]
        return max((version for version in known if isinstance(version, int)), default=None)

    async def lost_groups(self) -> list[PromptGroup]:
        """Groups that were trained into weights which no checkpoint holds. What cannot be read is set aside."""
        context, lost, unreadable = self._context, [], {}
        for group_id, payload in (await context.streams.uncommitted()).items():
            try:
                lost.append(decode(payload, PromptGroup, max_bytes=context.config.queues.max_payload_bytes))
            except MessageError as error:
                unreadable[group_id] = str(error)
                context.log.warning("dead_letter", group_id=group_id, reason=str(error))
        context.metrics.dead_letters_total.labels(stage=Stream.PROMPTS.value).inc(len(unreadable))
        await context.streams.bury_uncommitted(unreadable)
        if lost:
            context.log.info("fed_again", num_groups=len(lost))
        return lost

    async def save(
        self,
        learner: Learner,
        state: TrainerState,
        statistics: PromptStatistics,
        *,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> TrainerState:
        """Copy what a checkpoint holds, and write it while training goes on; `start` runs the writing.

        Waits for the one before. When it cannot be written and checkpoint.on_failure says to stop, the task
        raises CheckpointError; otherwise its groups stay uncommitted until the next one. It raises
        TrainerReplacedError, and leaves nothing, when another trainer took the run over.
        """
        state = await self._settled(state)
        if state.step == self._saved_step:
            return state
        started = time.monotonic()
        with self._context.busy_with("copying its state"):
            copied = await asyncio.to_thread(learner.snapshot)
        pause_s = time.monotonic() - started
        self._writing = start(self._write_or_go_on(copied, state, statistics.encode(), pause_s))
        return state

    async def save_last(self, learner: Learner, state: TrainerState, statistics: PromptStatistics) -> TrainerState:
        """Write the checkpoint that nothing comes after. Raises CheckpointError or TrainerReplacedError.

        One of this step that is there already stays: it says which groups it commits. Before the first step
        there is nothing to keep.
        """
        state = await self._settled(state)
        if state.step not in {0, self._saved_step}:
            with self._context.busy_with("writing a checkpoint"):
                await self._write(learner, state, statistics.encode(), pause_s=0.0)
        return state.without(self._committed)

    async def _settled(self, state: TrainerState) -> TrainerState:
        """The state when nothing is being written any more."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        return state.without(self._committed)

    async def _write_or_go_on(self, copied: Savable, state: TrainerState, statistics: bytes, pause_s: float) -> None:
        try:
            await self._write(copied, state, statistics, pause_s=pause_s)
        except CheckpointError as error:
            if self._context.config.checkpoint.on_failure == "stop":
                raise
            self._context.log.error("checkpoint_failed", step=state.step, reason=str(error))

    async def _write(self, learner: Savable, state: TrainerState, statistics: bytes, *, pause_s: float) -> None:
        """Write, then commit the groups whose effect is in it. pause_s: that training stood still for it."""
        context = self._context
        content: dict[str, Json] = {
            "step": state.step,
            "version": state.version,
            "cursor": state.cursor,
            "committed": [*state.uncommitted],
            "settings": dict(fingerprint(context.config)),
        }
        await context.fleet.hold_trainer(context.worker_id, context.trainer_term_s)
        started = time.monotonic()
        try:
            attached = {STATISTICS_FILE: statistics}
            path = await asyncio.to_thread(
                self._checkpoints.save, state.step, learner=learner, state=content, attached=attached
            )
        except CheckpointError:
            context.metrics.checkpoint_failures_total.inc()
            raise
        self._saved_step = state.step
        await context.streams.commit(state.uncommitted)
        self._committed = frozenset(state.uncommitted)
        context.metrics.checkpoint_seconds.observe(time.monotonic() - started)
        context.metrics.checkpoint_pause_seconds.observe(pause_s)
        context.metrics.checkpoint_step.set(state.step)
        context.log.info("checkpoint_written", step=state.step, path=str(path), pause_s=round(pause_s, 3))


def _integer(state: Mapping[str, Json], name: str) -> int:
    value = state[name]
    assert isinstance(value, int), f"{name} was saved as an integer"
    return value


def _strings(state: Mapping[str, Json], name: str) -> list[str]:
    value = state[name]
    assert isinstance(value, list), f"{name} was saved as a list"
    return [str(item) for item in value]
