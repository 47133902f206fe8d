"""What stages that score have in common.

In: a scored group. Out: its entry for the next stream; and the work of a stage that adds to the scores which a
group has already.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from pipeline.config.scoring import ModelAtWork
from pipeline.errors import ServerAwayError
from pipeline.messages import Score, ScoredGroup
from pipeline.streams import Entry, Lease
from pipeline.wire import decode, encode
from pipeline.worker.context import WorkerContext
from pipeline.worker.stage import HandBack

# One in work, and one that has been read meanwhile.
_LOCAL_GROUPS = 2
_LOOK_EVERY_S = 1.0


class Models(Protocol):
    """Teachers, or judges."""

    async def start(self) -> None:
        """Load them, or reach their servers. Raises UsageError, ServiceUnavailableError."""

    async def away(self) -> str:
        """Why servers cannot be reached; empty where all can."""

    async def close(self) -> None:
        """Let everything go. Safe to call twice."""


async def until_servers_answer(context: WorkerContext, models: Models) -> None:
    """Returns when all do, or the worker drains; says meanwhile which does not."""
    while not context.draining.is_set():
        if not (away := await models.away()):
            break
        context.waiting_for(f"a server ({away}): start it, or this {context.role} anew with another url")
        await context.wait_for_any(timeout_s=_LOOK_EVERY_S)
    context.waiting_for(None)


def entry_of(lease: Lease, group: ScoredGroup) -> Entry:
    """It, under the oldest version of its tokens."""
    rollout = group.rollout
    return Entry(
        group_id=lease.group_id,
        weight_version=min(completion.spans[0].weight_version for completion in rollout.completions),
        payload=encode(group),
        is_evaluation=rollout.prompt.is_evaluation,
    )


async def begin(context: WorkerContext, models: Models) -> bool:
    """Start them once their servers are there; False when the worker drains before. Raises as `start`."""
    await until_servers_answer(context, models)
    if context.draining.is_set():
        return False
    with context.busy_with("loading its models"):
        await models.start()
    context.set_ready(True)
    return True


class AddingWork(ABC):
    """Asks models about groups. settings: of all that are asked. hops: what the times of claim and end are called."""

    def __init__(
        self, context: WorkerContext, models: Models, settings: Sequence[ModelAtWork], *, hops: tuple[str, str]
    ) -> None:
        self.context = context
        self._models = models
        self._hops = hops
        self._began: list[float] = []  # of each group in work, the oldest first
        self._titles = " or ".join(model.title for model in settings)
        self._was_away = False
        remote = [model.max_concurrency for model in settings if model.url]
        group_size = context.config.generation.group_size
        self._max_in_work = max([_LOCAL_GROUPS, *(number // group_size + 1 for number in remote)])

    @abstractmethod
    async def scores_of(self, group: ScoredGroup) -> tuple[Score, ...]:
        """Its scores with what is added."""

    def capacity(self) -> int:
        """Groups that can be taken on now."""
        return self._max_in_work - len(self._began)

    async def may_claim(self) -> None:
        """Returns when every server answers: while one is away groups are left where they are.

        Says how long models have been asked, for those who ask why nothing moves.
        """
        oldest_s = time.time() - self._began[0] if self._began else 0.0
        self.context.set_status(in_reward=self._titles if self._began else None, in_reward_s=round(oldest_s, 1))
        if self._was_away:
            self._was_away = False
            await until_servers_answer(self.context, self._models)

    async def process(self, lease: Lease) -> Entry:
        """The group with more scores. Raises MessageError, HandBack while a server is away, and as `scores_of`."""
        context, claimed = self.context, time.time()
        self._began.append(claimed)
        try:
            group = decode(lease.payload, ScoredGroup, max_bytes=context.config.queues.max_payload_bytes)
            scores = await self.scores_of(group)
        except ServerAwayError as error:
            self._was_away = True
            raise HandBack(str(error)) from error  # which is no attempt: however long the server is away
        finally:
            self._began.remove(claimed)
        context.metrics.tokens_in_total.inc(sum(map(len, group.rollout.completions)))
        hops = {**group.hops, **dict(zip(self._hops, (claimed, time.time()), strict=True))}
        return entry_of(lease, dataclasses.replace(group, scores=scores, hops=hops))
