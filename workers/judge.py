"""A judge: scored groups in, the same with the rewards of judges out.

In: `ScoredGroup`s. Out: `ScoredGroup`s. Judges behind a server need no torch; a reward model is loaded here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.judges import Judges
from pipeline.keys import Stream
from pipeline.messages import Outcome, Score, ScoredGroup
from pipeline.streams import Entry, Lease
from pipeline.wire import decode
from pipeline.worker.lifecycle import WorkerContext, run_worker
from pipeline.worker.scored import entry_of
from pipeline.worker.stage import Stage

# One in work, and one that has been read meanwhile.
_LOCAL_GROUPS = 2


class JudgingWork:
    """Asks judges about groups."""

    def __init__(self, context: WorkerContext, judges: Judges) -> None:
        self._context = context
        self._judges = judges
        self._names = {settings.title for settings in context.config.scoring.judges}
        self._num_in_work = 0
        remote = [item.max_concurrency for item in context.config.scoring.judges if item.url]
        group_size = context.config.generation.group_size
        self._max_in_work = max([_LOCAL_GROUPS, *(number // group_size + 1 for number in remote)])

    def capacity(self) -> int:
        """Groups that can be taken on now."""
        return self._max_in_work - self._num_in_work

    async def process(self, lease: Lease) -> Entry:
        """The group with rewards. Raises MessageError, ConfigError."""
        context, claimed = self._context, time.time()
        self._num_in_work += 1
        try:
            group = decode(lease.payload, ScoredGroup, max_bytes=context.config.queues.max_payload_bytes)
            scores = await self._judges.judge(group.rollout, group.scores)
        finally:
            self._num_in_work -= 1
        context.metrics.tokens_in_total.inc(sum(map(len, group.rollout.completions)))
        self._count(scores)
        hops = {**group.hops, "judge_claimed": claimed, "judged": time.time()}
        return entry_of(lease, dataclasses.replace(group, scores=scores, hops=hops))

    def _count(self, scores: tuple[Score, ...]) -> None:
        metrics = self._context.metrics
        for part in (part for score in scores for part in score.parts if part.name in self._names):
            metrics.reward_calls_total.labels(function=part.name, outcome=part.outcome.value).inc()
            if part.value is not None:
                metrics.reward_value.labels(function=part.name).observe(part.value)
                metrics.reward_accumulated.labels(function=part.name).inc(part.value)


async def body(context: WorkerContext) -> None:
    """Judge until drained."""
    settings, metrics = context.config.scoring.judges, context.metrics
    if not settings:
        raise ConfigError("scoring.judges is empty: a judge has nothing to ask; name one in a [[scoring.judges]] table")
    for judge, outcome in itertools.product(settings, Outcome):
        metrics.reward_calls_total.labels(function=judge.title, outcome=outcome.value)

    def on_call(name: str, seconds: float) -> None:
        metrics.reward_seconds.labels(function=name).observe(seconds)

    with context.busy_with("loading its models"):
        judges = await asyncio.to_thread(lambda: Judges(context.config, on_call=on_call))  # which imports much
    try:
        with context.busy_with("loading its models"):
            await judges.start()
        context.set_ready(True)
        await Stage(context, source=Stream.TO_JUDGE, work=JudgingWork(context, judges)).run()
    finally:
        await judges.close()


def main(config: Config) -> int:
    """Exit code of a judge process."""
    return run_worker("judge", config, body)
