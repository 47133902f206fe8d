"""What is generated of a group when its generator has to leave, and who goes on with it.

In: partial groups of an engine that was interrupted. Out: their bytes, which travel with the group
as it is handed back, and for whoever claims it next what of them may be used. A partial that is
broken, of another prompt or too old is told and left alone: the group is then generated afresh.
"""

from __future__ import annotations

from pipeline.errors import MessageError
from pipeline.messages import PartialGroup, PromptGroup
from pipeline.wire import decode, encode
from pipeline.worker.context import WorkerContext


class Partials:
    """Those of one generator."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._max_bytes = context.config.queues.max_payload_bytes
        self._num_groups = self._num_finished = self._num_unfinished = self._num_tokens = 0

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
