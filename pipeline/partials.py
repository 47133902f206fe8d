"""What is generated of a group when its generator is killed or has to leave, and who goes on with it.

In: partial groups of an engine, as it goes on or was interrupted. Out: their bytes, saved while the
group is held or travelling with it as it is handed back, and for whoever claims it next what of them
may be used. A partial that is broken, of another prompt or too old is told and left alone: the group
is then generated afresh.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import MessageError
from pipeline.messages import PartialGroup, PromptGroup
from pipeline.streams import Lease
from pipeline.wire import decode, encode
from pipeline.worker.context import WorkerContext

_LOOK_EVERY_S = 0.5


class Generating(Protocol):
    """What is asked of an engine."""

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start."""

    async def so_far(self) -> list[PartialGroup]:
        """What there is of every group in flight; all go on."""


@dataclass(slots=True)
class _InWork:
    """A group that is being generated. num_saved: tokens of each completion that others would find."""

    lease: Lease
    num_saved: dict[int, int]

    def has_grown(self, partial: PartialGroup, by: int) -> bool:
        """Whether a completion has grown by so many tokens since it was saved."""
        return any(number - self.num_saved.get(index, 0) >= by for index, number in _lengths(partial).items())


class Partials:
    """Those of one generator."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._max_bytes = context.config.queues.max_payload_bytes
        self._num_groups = self._num_finished = self._num_unfinished = self._num_tokens = 0
        self._in_work: dict[str, _InWork] = {}

    @contextlib.contextmanager
    def in_work(self, lease: Lease, taken_up: PartialGroup | None) -> Iterator[None]:
        """While a group is generated it is saved now and then. taken_up: what it is continued from."""
        self._in_work[lease.group_id] = _InWork(lease, _lengths(taken_up) if taken_up else {})
        try:
            yield
        finally:
            del self._in_work[lease.group_id]

    async def keep_saving(self, engine: Generating) -> None:
        """Save what has grown by `generation.save_every_tokens`, as long as the generator lives; cancel it.

        Decoding goes on meanwhile, and what is saved together is one call.
        """
        every, before = self._context.config.generation.save_every_tokens, 0
        while every:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = engine.num_tokens_generated
            if now - before < every:
                continue
            before = now
            found = {partial.prompt.group_id: partial for partial in await engine.so_far()}
            due = [name for name, work in self._in_work.items() if name in found and work.has_grown(found[name], every)]
            await self._save([found[name] for name in due])

    async def _save(self, grown: Sequence[PartialGroup]) -> None:
        encoded = await asyncio.to_thread(lambda: {partial.prompt.group_id: encode(partial) for partial in grown})
        fitting = {name: payload for name, payload in encoded.items() if len(payload) <= self._max_bytes}
        # Some may have been completed meanwhile.
        leases = [self._in_work[name].lease for name in fitting if name in self._in_work]
        if not leases:
            return
        await self._context.streams.save_partials(leases, fitting)
        for partial in grown:
            if (work := self._in_work.get(partial.prompt.group_id)) is not None:
                work.num_saved = _lengths(partial)

    async def take_up(self, prompt: PromptGroup) -> PartialGroup | None:
        """What there is of a group to go on from."""
        payload = await self._context.streams.partial(prompt.group_id)
        if payload is None:
            return None
        try:
            found = decode(payload, PartialGroup, max_bytes=self._max_bytes)
        except MessageError as error:
            self._context.log.warning("partial_refused", group_id=prompt.group_id, reason=str(error))
            return None
        if not found.fits(prompt):
            self._context.log.warning(
                "partial_refused", group_id=prompt.group_id, reason="it was generated from another prompt or otherwise"
            )
            self._waste("mismatch", found.num_tokens)
            return None
        usable = found.since(self._oldest_version(prompt))
        self._waste("stale", found.num_tokens - usable.num_tokens)
        self._context.metrics.tokens_carried_total.inc(usable.num_tokens)
        return usable if usable.num_tokens else None

    def _oldest_version(self, prompt: PromptGroup) -> int:
        """What is older would be dropped for its age before it could be trained."""
        staleness = self._context.config.staleness
        if staleness.policy != "drop" or prompt.is_evaluation:
            return 0
        return (self._context.run_version or 0) - staleness.max_staleness

    def leave(self, partial: PartialGroup, taken_up: PartialGroup | None) -> bytes | None:
        """What is to be saved of an interrupted group; None for nothing. taken_up: what it was continued from."""
        num_tokens = partial.num_tokens
        num_new = num_tokens - (taken_up.num_tokens if taken_up else 0)
        self._context.metrics.tokens_out_total.inc(num_new)
        if not num_tokens:
            return None
        payload = encode(partial)
        if len(payload) > self._max_bytes:
            self._waste("too_large", num_new)
            self._context.log.warning(
                "partial_too_large",
                group_id=partial.prompt.group_id,
                reason=f"{len(payload)} bytes exceed queues.max_payload_bytes = {self._max_bytes}",
            )
            return None
        self._num_groups += 1
        self._num_finished += len(partial.finished)
        self._num_unfinished += len(partial.unfinished)
        self._num_tokens += num_tokens
        return payload

    def say(self) -> None:
        """How much was left for others."""
        if self._num_groups:
            self._context.log.info(
                "left_for_others",
                groups=self._num_groups,
                finished=self._num_finished,
                unfinished=self._num_unfinished,
                tokens=self._num_tokens,
            )

    def _waste(self, reason: str, num_tokens: int) -> None:
        if num_tokens:
            self._context.metrics.tokens_wasted_total.labels(reason=reason).inc(num_tokens)


def _lengths(partial: PartialGroup) -> dict[int, int]:
    """Tokens of each completion, by its index."""
    finished = {index: len(item) for index, item in partial.finished.items()}
    return finished | {index: len(item) for index, item in partial.unfinished.items()}
