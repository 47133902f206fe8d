"""A generator: prompts in, completions out, weights replaced while it goes.

In: `PromptGroup`s and verified weights. Out: `RolloutGroup`s. It claims nothing before its
weights are new enough, and every token says which weights sampled it.
"""

from __future__ import annotations

import asyncio
import time

from pipeline.config import Config
from pipeline.engines import GenerationEngine, Interrupted
from pipeline.engines.registry import create_engine
from pipeline.engines.watchdog import Watchdog
from pipeline.keys import Stream
from pipeline.messages import PromptGroup, RolloutGroup
from pipeline.partials import Partials
from pipeline.roster import WaitCause
from pipeline.run.following import WeightFollower
from pipeline.streams import Entry, Lease
from pipeline.wire import decode, encode
from pipeline.worker.lifecycle import WorkerContext, run_worker
from pipeline.worker.stage import HandBack, Stage
from pipeline.worker.turns import Alternation, DeviceTurn

_FRESHNESS_WAIT_S = 0.5


class GenerationWork:
    """Completes prompt groups on one engine."""

    def __init__(self, context: WorkerContext, engine: GenerationEngine) -> None:
        self._context = context
        self._engine = engine
        self._partials = Partials(context)
        self._group_size = context.config.generation.group_size
        self._num_counted = self._num_arriving = 0
        context.metrics.sequence_slots.set(engine.max_num_seqs)
        self.version_changed = asyncio.Event()

    def capacity(self) -> int:
        """Groups for which there are free slots; one more than fits when nothing runs."""
        self._say_progress()
        taken = self._engine.num_unfinished_seqs + self._num_arriving * self._group_size
        free = (self._engine.max_num_seqs - taken) // self._group_size
        return max(1, free) if taken == 0 else free

    async def process(self, lease: Lease) -> Entry:
        """The rollout. Raises MessageError, EngineError, and HandBack with what there is of an interrupted group."""
        context = self._context
        claimed = time.time()
        self._num_arriving += 1
        try:
            prompt = decode(lease.payload, PromptGroup, max_bytes=context.config.queues.max_payload_bytes)
            # Groups that are claimed together reach the engine together: the others ask for nothing here.
            partial = await self._partials.take_up(prompt) if lease.has_partial else None
            await self._until_version(max(prompt.min_version, partial.newest_version if partial else 0))
        finally:
            self._num_arriving -= 1
        try:
            with self._partials.in_work(lease, partial):
                completions = await self._engine.generate(prompt, partial)
        except Interrupted as interrupted:
            raise HandBack("this worker drains", partial=self._partials.leave(interrupted.partial, partial)) from None
        rollout = RolloutGroup(
            prompt=prompt,
            completions=completions,
            generator=context.worker_id,
            hops={"generator_claimed": claimed, "generated": time.time()},
        )
        context.metrics.tokens_in_total.inc(len(prompt.prompt_token_ids))
        num_tokens = sum(len(completion) for completion in completions)
        context.metrics.tokens_out_total.inc(num_tokens - (partial.num_tokens if partial else 0))
        self._say_progress()
        return Entry(
            group_id=lease.group_id,
            weight_version=min(completion.spans[0].weight_version for completion in completions),
            payload=encode(rollout),
            is_evaluation=prompt.is_evaluation,
            num_tokens=num_tokens,
        )

    async def stop_at_drain(self) -> None:
        """When the worker drains, what is in flight is not waited for: others go on with it."""
        await self._context.draining.wait()
        await self._engine.interrupt()

    async def save_as_it_goes(self) -> None:
        """When the worker is killed, others go on with what it has saved. Never returns; cancel it."""
        await self._partials.keep_saving(self._engine)

    def say_what_is_left(self) -> None:
        """For the log, when the worker has drained."""
        self._partials.say()

    def _say_progress(self) -> None:
        """A group may take minutes, in which only its tokens show that it moves."""
        engine, metrics = self._engine, self._context.metrics
        num_tokens = engine.num_tokens_generated
        self._context.set_status(tokens_generated=num_tokens)
        metrics.tokens_sampled_total.inc(max(0, num_tokens - self._num_counted))
        metrics.sequences_running.set(engine.num_unfinished_seqs)
        self._num_counted = num_tokens

    async def _until_version(self, min_version: int) -> None:
        """Waits for weights that this prompt allows; hands it back when they do not come.

        At once where there are none any more: since it was claimed, an update has broken off.
        """
        patience = time.monotonic() + self._context.config.queues.lease_s
        while (version := self._engine.weight_version) is None or version < min_version:
            if version is None or self._context.draining.is_set() or time.monotonic() > patience:
                raise HandBack(f"needs weights of version {min_version}, serving {version}")
            # Groups that were claimed together wait for one event, not each for its own timer: they reach
            # the engine together then, too, and with no staleness a run gives the same weights every time.
            self.version_changed.clear()
            await self._context.wait_for_any(self.version_changed, timeout_s=max(0.0, patience - time.monotonic()))

    async def watch_version(self) -> None:
        """Servers that come and go change the engine's version without an update. Never returns; cancel it."""
        while True:
            before = self._engine.weight_version
            await asyncio.sleep(_FRESHNESS_WAIT_S)
            if self._engine.weight_version != before:
                self.version_changed.set()

    async def may_claim(self) -> None:
        """Returns when the engine's weights suffice for the prompts that are being fed."""
        context = self._context
        while not context.draining.is_set() and not self._is_fresh():
            started = time.monotonic()
            self._say_progress()
            context.waiting_for(self._missing_weights(), WaitCause.WEIGHTS)
            self.version_changed.clear()
            await context.wait_for_any(self.version_changed, timeout_s=_FRESHNESS_WAIT_S)
            context.metrics.idle_seconds_total.labels(cause="stale_weights").inc(time.monotonic() - started)

    def _is_fresh(self) -> bool:
        version = self._engine.weight_version
        oldest_allowed = (self._context.run_version or 0) - self._context.config.staleness.max_staleness
        return version is not None and version >= oldest_allowed

    def _missing_weights(self) -> str:
        if self._context.run_version is None:
            return "a trainer that publishes weights"
        serving = self._engine.weight_version
        return f"weights of version {self._context.run_version} (serving {'none' if serving is None else serving})"


async def body(context: WorkerContext) -> None:
    """Generate until drained."""
    turn = DeviceTurn(context)
    context.waiting_for("the device" if turn.is_shared else None)
    await context.unless_draining(turn.take())
    try:
        if not context.draining.is_set():
            await _generate_with_new_engine(context, turn)
    finally:
        await turn.give()


async def _generate_with_new_engine(context: WorkerContext, turn: DeviceTurn) -> None:
    context.waiting_for("its model to load")
    # In a thread: importing an engine takes seconds, in which heartbeats must go on.
    engine = await asyncio.to_thread(create_engine, context.config, resolve=context.fleet.endpoints)
    await engine.start()
    context.waiting_for(None)
    try:
        await generate(context, engine, turn)
    finally:
        await engine.close()


async def generate(context: WorkerContext, engine: GenerationEngine, turn: DeviceTurn) -> None:
    """Follow the weights and complete groups, on an engine that was started, until drained."""
    work, alternation = GenerationWork(context, engine), Alternation(turn, engine)
    async with asyncio.TaskGroup() as group:
        follower = group.create_task(WeightFollower(context, engine, alternation, changed=work.version_changed).run())
        alternating = group.create_task(alternation.run())
        stopper = group.create_task(work.stop_at_drain())
        saver = group.create_task(work.save_as_it_goes())
        versions = group.create_task(work.watch_version())
        watchdog = Watchdog(engine, context.config.generation.stall_s, lambda: alternation.is_asleep)
        watching = group.create_task(watchdog.run())
        stage = Stage(context, source=Stream.PROMPTS, work=work)
        await stage.run(may_claim=work.may_claim)
        for task in (follower, alternating, stopper, saver, versions, watching):
            task.cancel()
        work.say_what_is_left()


def main(config: Config) -> int:
    """Exit code of a generator process."""
    return run_worker("generator", config, body)
