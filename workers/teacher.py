"""A teacher: scored groups in, the same with a teacher's logprobs out.

In: `ScoredGroup`s. Out: `ScoredGroup`s. Its models are never trained and never sample.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.keys import Stream
from pipeline.messages import ScoredGroup
from pipeline.streams import Entry, Lease
from pipeline.teachers import Teachers
from pipeline.wire import decode
from pipeline.worker.lifecycle import WorkerContext, run_worker
from pipeline.worker.scored import entry_of
from pipeline.worker.stage import Stage

# One in work, and one that has been read meanwhile.
_LOCAL_GROUPS = 2


class TeachingWork:
    """Asks teachers about groups."""

    def __init__(self, context: WorkerContext, teachers: Teachers) -> None:
        self._context = context
        self._teachers = teachers
        self._num_in_work = 0
        remote = [item.max_concurrency for item in context.config.scoring.teachers if item.url]
        group_size = context.config.generation.group_size
        self._max_in_work = max([_LOCAL_GROUPS, *(number // group_size + 1 for number in remote)])

    def capacity(self) -> int:
        """Groups that can be taken on now."""
        return self._max_in_work - self._num_in_work

    async def process(self, lease: Lease) -> Entry:
        """The group with logprobs. Raises MessageError, ScoringError."""
        context, claimed = self._context, time.time()
        self._num_in_work += 1
        try:
            group = decode(lease.payload, ScoredGroup, max_bytes=context.config.queues.max_payload_bytes)
            logprobs = await self._teachers.logprobs(group.rollout)
        finally:
            self._num_in_work -= 1
        context.metrics.tokens_in_total.inc(sum(map(len, group.rollout.completions)))
        scores = group.scores
        if logprobs is not None:
            pairs = zip(scores, logprobs, strict=True)
            scores = tuple(dataclasses.replace(score, teacher_logprobs=values) for score, values in pairs)
        hops = {**group.hops, "teacher_claimed": claimed, "taught": time.time()}
        return entry_of(lease, dataclasses.replace(group, scores=scores, hops=hops))


async def body(context: WorkerContext) -> None:
    """Teach until drained."""
    if not context.config.scoring.teachers:
        raise ConfigError(
            "scoring.teachers is empty: a teacher has nothing to ask; name one in a [[scoring.teachers]] table"
        )
    with context.busy_with("loading its models"):
        teachers = await asyncio.to_thread(Teachers, context.config)  # which imports much
    try:
        with context.busy_with("loading its models"):
            await teachers.start()
        context.set_ready(True)
        await Stage(context, source=Stream.TO_TEACH, work=TeachingWork(context, teachers)).run()
    finally:
        await teachers.close()


def main(config: Config) -> int:
    """Exit code of a teacher process."""
    return run_worker("teacher", config, body)
