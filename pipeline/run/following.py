"""A generator's weights on their way in: every new version, as it arrives.

In: verified weights from the trainer or a relay. Out: an engine that generates with them, and whoever
waits for them woken. Weights that the engine refuses are counted; the next ones are tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time

from pipeline.engines import GenerationEngine
from pipeline.errors import WeightError
from pipeline.roster import endpoints_text, read_endpoints
from pipeline.weights import Endpoints
from pipeline.weights.address_watch import Resolve
from pipeline.weights.channel import create_subscriber
from pipeline.weights.relay import Relay, resolve_in_tree
from pipeline.worker.context import WorkerContext
from pipeline.worker.turns import Alternation

_RECEIVING_WAIT_S = 0.5
_COUNT_EVERY_S = 2.0


class WeightFollower:
    """Applies every new version that arrives and sets `changed`, for as long as the generator lives."""

    def __init__(
        self, context: WorkerContext, engine: GenerationEngine, alternation: Alternation, *, changed: asyncio.Event
    ) -> None:
        self._context = context
        self._engine = engine
        self._changed = changed
        self._alternation = alternation
        settings = context.config.weights
        self._relay = Relay(settings) if settings.relay else None
        self._subscriber = create_subscriber(settings, self._source(), run_id=context.run_id, relay=self._relay)
        self._newest_seen: int | None = None
        self._counted = copy.copy(self._subscriber.stats)

    async def run(self) -> None:
        """Never returns; cancel it."""
        with contextlib.closing(self._subscriber), contextlib.ExitStack() as stack:
            if self._relay is not None:
                stack.callback(asyncio.create_task(self._announce(self._relay.start())).cancel)
            stack.callback(asyncio.create_task(self._count_what_is_wrong()).cancel)
            while True:
                await self._follow_one()

    def _source(self) -> Resolve:
        """Where weights come from: the trainer, or a relay where this generator is one."""
        context, fleet = self._context, self._context.fleet

        async def relays() -> list[tuple[str, Endpoints]]:
            there = [worker for worker in await fleet.workers() if worker.is_alive and worker.status.get("relay")]
            there.sort(key=lambda worker: (worker.started_at, worker.worker_id))
            told = [(worker.worker_id, read_endpoints(str(worker.status["relay"]))) for worker in there]
            return [(worker_id, endpoints) for worker_id, endpoints in told if endpoints is not None]

        if not context.config.weights.relay:
            return fleet.endpoints
        return resolve_in_tree(
            fleet.endpoints, relays, own_id=context.worker_id, fanout=context.config.weights.relay_fanout
        )

    async def _announce(self, relay: Endpoints) -> None:
        """Say that this generator passes weights on, once it is the one of its machine that receives them."""
        while not self._subscriber.is_receiving:  # noqa: ASYNC110  another process sets no event
            await asyncio.sleep(_RECEIVING_WAIT_S)
        self._context.set_status(relay=endpoints_text(relay))

    async def _follow_one(self) -> None:
        """The next version, received and applied."""
        state = await self._subscriber.next(self._newest_seen)
        self._newest_seen = version = state.weight_version
        context, metrics = self._context, self._context.metrics
        try:
            async with self._alternation.awake:
                started = time.monotonic()
                pause_s = await self._engine.apply_weights(state)
        except WeightError as error:
            metrics.weight_failures_total.inc()
            context.log.error("weights_refused", weight_version=version, reason=str(error))
            if self._engine.weight_version is None:
                await self._begin_anew()
            return
        metrics.weight_pause_seconds.observe(pause_s)
        metrics.weight_apply_seconds.observe(time.monotonic() - started)
        metrics.weight_version.set(version)
        self._count_transfer()
        context.set_status(weight_version=version)
        context.set_ready(True)
        self._changed.set()
        context.log.debug("weights_applied", weight_version=version, pause_s=round(pause_s, 4))

    async def _begin_anew(self) -> None:
        """An update broke off and nobody knows what the engine holds: whatever is newest heals it, also the same."""
        self._newest_seen = None
        self._context.set_ready(False)
        self._context.set_status(weight_version=None)
        await self._context.wait_for_any(timeout_s=self._context.config.weights.poll_s)

    async def _count_what_is_wrong(self) -> None:
        """Also while no version can be had, which is when somebody looks."""
        before = {"corrupt": 0, "lost": 0, "refused": 0}
        while True:
            stats = self._subscriber.stats
            now = {"corrupt": stats.num_corrupt_tiles, "lost": stats.num_lost_tiles, "refused": stats.num_refused}
            for reason, count in now.items():
                self._context.metrics.weight_pieces_wrong_total.labels(reason=reason).inc(count - before[reason])
            before = now
            await asyncio.sleep(_COUNT_EVERY_S)

    def _count_transfer(self) -> None:
        stats, before = self._subscriber.stats, self._counted
        metrics = self._context.metrics
        metrics.weight_receive_seconds.observe(stats.receive_s - before.receive_s)
        metrics.weight_verify_seconds.observe(stats.verify_s - before.verify_s)
        metrics.weight_bytes_total.inc(stats.num_received_bytes - before.num_received_bytes)
        metrics.weight_content_bytes_total.inc(stats.num_bytes - before.num_bytes)
        metrics.weight_patched_total.inc(stats.num_patched - before.num_patched)
        metrics.weight_skipped_total.inc(stats.num_skipped - before.num_skipped)
        self._counted = copy.copy(stats)
