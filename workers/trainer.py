"""The trainer: scored groups in, new weights out.

    feed        version, live groups            -> prompts            waits for: freed slots
    collect     scored                          -> held groups        waits for: scorers
    train       a batch of held groups          -> weights, version+1 waits for: a full batch
    publish     weights                         -> weight channel     waits for: nothing
    finish      the batch                       -> ledger, free slots waits for: nothing

One trainer per run. The version rises before slots are freed, so that a prompt is never stamped
with weights that are about to be replaced.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from pipeline.collector import Collector, HeldGroup
from pipeline.config import Config
from pipeline.evaluation import EvaluationReport, Evaluator
from pipeline.feeder import Feeder
from pipeline.filters import group_reward
from pipeline.learner import Learner
from pipeline.ranks.place import check_settings, place_of
from pipeline.roster import WaitCause
from pipeline.run.data import RunData, load_run_data
from pipeline.run.progress import Progress
from pipeline.run.publishing import Publishing
from pipeline.run.recovery import Recovery, TrainerState
from pipeline.run.resumption import checkpoint_to_go_on_from
from pipeline.run.time_sheet import Doing, TimeSheet
from pipeline.worker.lifecycle import WorkerContext, run_worker
from pipeline.worker.turns import DeviceTurn
from workers import rank

_FEED_WAIT_S = 0.5


class Trainer:
    """One run's training, from the first prompt to the last step."""

    def __init__(
        self, context: WorkerContext, learner: Learner, data: RunData, recovery: Recovery, turn: DeviceTurn
    ) -> None:
        config = context.config
        self._context = context
        self._turn = turn
        self._config = config
        self._learner = learner
        self._data = data
        self._recovery = recovery
        self._publishing = Publishing(context, learner, recovery)
        self._progress = Progress(context, config)
        self._time = TimeSheet(context.metrics)
        self._evaluator = Evaluator(context.streams)
        self._feeder = Feeder(
            context.streams,
            data.source,
            groups_per_step=config.trainer.groups_per_step,
            max_staleness=config.staleness.max_staleness,
        )
        self._collector = Collector(
            context.streams,
            context.keeper,
            self._feeder,
            groups_per_step=config.trainer.groups_per_step,
            max_payload_bytes=config.queues.max_payload_bytes,
            staleness=config.staleness,
            algorithm=config.algorithm,
            on_evaluation=self._evaluator.receive,
            on_dead=self._progress.dead_letter,
            on_drop=lambda ids, reason: self._progress.drop(self._state.step, ids, reason),
            on_judged=self._observe,
        )
        self._state = TrainerState(step=0, version=0, cursor=0)
        self._slots_freed = asyncio.Event()

    async def run(self) -> None:
        """Train to the last step or the end of the data; then stop the run."""
        self._state = await self._recovery.restore(self._learner, self._data.statistics)
        await asyncio.to_thread(self._progress.goes_on_from, self._state.step)
        self._data.source.cursor = self._state.cursor
        self._feeder.feed_again(await self._recovery.lost_groups())
        try:
            await self._publishing.open()
            await self._publishing.publish(self._state.version)
            self._context.set_ready(True)
            async with asyncio.TaskGroup() as group:
                self._start = group.create_task
                helpers = [
                    group.create_task(work) for work in (self._feed(), self._collector.run(), self._look_after())
                ]
                ended = await self._train()
                for helper in helpers:
                    helper.cancel()
            self._state = self._state.with_cursor(self._feeder.cursor)
            self._state = await self._recovery.save_last(self._learner, self._state, self._data.statistics)
            if ended:
                await self._feeder.put_back_lost(version=self._state.version)
            await self._recovery.conclude(self._state.version, ended)
            if ended:
                await self._context.fleet.stop(ended)
        finally:
            self._publishing.close()
            self._progress.close()

    async def _train(self) -> str | None:
        """All steps. Returns why the run has ended, or None when this trainer was drained."""
        settings = self._config.evaluation
        await self._evaluate(wanted=settings.at_start and self._state.step == 0, wait=False)
        while not self._context.draining.is_set():
            if self._has_done_all_steps():
                await self._evaluate(wanted=settings.at_end, wait=True)
                return f"all {self._state.step} steps are done"
            await self._context.wait_while_paused()
            started = time.monotonic()
            batch = await self._next_batch()
            if batch is None:
                continue
            if not batch:
                await self._evaluate(wanted=settings.at_end, wait=True)
                return "the data has ended"
            waited_s = time.monotonic() - started
            async with self._turn.held():
                await self._step(batch, waited_s=waited_s)
                if self._turn.is_shared:
                    await asyncio.to_thread(self._learner.leave_device)
            every = settings.every_steps
            is_due = every > 0 and self._state.step % every == 0 and not self._has_done_all_steps()
            await self._evaluate(wanted=is_due, wait=False)
        return None

    async def _next_batch(self) -> list[HeldGroup] | None:
        """A batch; empty at the end of the data; None when drained while waiting."""
        waiting = asyncio.ensure_future(self._collector.next_batch(self._state.version, on_wait=self._say_waiting))
        draining = asyncio.ensure_future(self._context.draining.wait())
        self._time.turn_to(Doing.WAIT_FOR_GROUPS)
        try:
            await asyncio.wait([waiting, draining], return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else None
        finally:
            self._time.turn_to(None)
            waiting.cancel()
            draining.cancel()
            self._context.waiting_for(None)
            self._context.set_status(dead_in_step=0, dropped_in_step=0)
            self._count_groups()

    def _say_waiting(self, num_dropped: int, num_dead: int) -> None:
        self._slots_freed.set()
        self._count_groups()
        self._context.waiting_for("scored groups", WaitCause.GROUPS)
        self._context.set_status(
            dead_in_step=num_dead,
            dropped_in_step=num_dropped,
            held=self._collector.num_held,
            groups_per_step=self._config.trainer.groups_per_step,
        )

    def _count_groups(self) -> None:
        self._context.metrics.groups_held.set(self._collector.num_held)
        self._progress.dropped(self._collector.dropped, self._collector.dropped_tokens)

    async def _step(self, batch: Sequence[HeldGroup], *, waited_s: float) -> None:
        groups = [held.group for held in batch]
        version = self._state.version
        started = time.monotonic()
        self._time.turn_to(Doing.STEP)
        with self._context.busy_with("an optimiser step"):
            metrics = await asyncio.to_thread(self._learner.step, groups, trainer_version=version)
        step_s = time.monotonic() - started
        self._time.turn_to(None)
        self._state = self._state.after_step([held.lease.group_id for held in batch])
        if self._state.step % self._config.weights.publish_every == 0 or self._has_done_all_steps():
            self._state = self._state.after_publish()
            await self._publishing.publish(self._state.version)
        num_refused = await self._collector.finish(batch)
        self._slots_freed.set()
        self._context.metrics.refused_total.inc(num_refused)
        self._progress.step(
            self._state,
            groups,
            metrics,
            trainer_version=version,
            waited_s=waited_s,
            step_s=step_s,
            dropped=self._collector.dropped,
            coverage=self._data.statistics.coverage(),
        )
        self._record(self._evaluator.take_reports())
        every = self._config.checkpoint.every_steps
        if every > 0 and self._state.step % every == 0 and not self._has_done_all_steps():
            self._state = self._state.with_cursor(self._feeder.cursor)
            self._state = await self._recovery.save(
                self._learner, self._state, self._data.statistics, start=self._start
            )

    def _observe(self, held: HeldGroup) -> None:
        """What a group says of its prompt, whether it was trained or not."""
        if (reward := group_reward(held.group)) is not None:
            self._data.statistics.observe(held.group.rollout.prompt.dataset_index, reward, held.versions[1])

    async def _feed(self) -> None:
        run_id = self._context.run_id
        while True:
            self._slots_freed.clear()
            if self._context.run_id != run_id:
                run_id = self._context.run_id
                await self._publishing.introduce_again(self._state.version)
            await self._feeder.top_up(
                version=self._state.version, limit=lambda: self._config.admission_limit_at(self._state.step)
            )
            self._progress.prompts_skipped(self._data.source.num_skipped, self._data.max_prompt_tokens)
            await self._context.wait_for_any(self._slots_freed, timeout_s=_FEED_WAIT_S)

    async def _look_after(self) -> None:
        """What nobody else does between two steps."""
        while True:
            self._time.tick()
            await self._publishing.look()
            await asyncio.sleep(self._config.worker.heartbeat_s)

    async def _evaluate(self, *, wanted: bool, wait: bool) -> None:
        if not wanted:
            return
        version = self._state.version
        await self._evaluator.start(self._data.evaluation_groups(version), version)
        if wait:
            self._context.waiting_for("evaluation of the final weights")
            await self._context.unless_draining(self._evaluator.wait(version))
            self._context.waiting_for(None)
            self._record(self._evaluator.take_reports())

    def _record(self, reports: Sequence[EvaluationReport]) -> None:
        for report in reports:
            self._progress.evaluation(self._state.step, report)

    def _has_done_all_steps(self) -> bool:
        return 0 < self._config.trainer.max_steps <= self._state.step


async def body(context: WorkerContext, load: Callable[[Config], Learner]) -> None:
    """Train until the run has ended or the worker drains."""
    config = context.config
    recovery = Recovery(context)
    if not await recovery.become_the_trainer():
        return
    context.waiting_for("its model to load")
    data = await asyncio.to_thread(load_run_data, config)
    turn = DeviceTurn(context, is_urgent=True)
    async with turn.held():
        context.waiting_for("its model to load")
        learner = await asyncio.to_thread(load, config)
        if turn.is_shared:
            await asyncio.to_thread(learner.leave_device)
    context.waiting_for(None)
    await Trainer(context, learner, data, recovery, turn).run()


def main(config: Config) -> int:
    """Exit code of a trainer process. Raises RunConflictError or ConfigError for a checkpoint that does not fit.

    Of several ranks, which torchrun has started or rank 0 starts, only rank 0 is a trainer to anyone else.
    """
    place = place_of(os.environ)
    check_settings(config, place)
    if not place.leads:
        return rank.main(config, place)
    # Now already: whoever joins a run that is new on the server decides its settings.
    checkpoint_to_go_on_from(config)
    return rank.lead(config, place, lambda load: run_worker("trainer", config, partial(body, load=load)))
