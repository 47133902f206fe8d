"""A judge: scored groups in, the same with the rewards of judges out.

In: `ScoredGroup`s. Out: `ScoredGroup`s. Judges behind a server need no torch; a reward model is loaded here.
"""

from __future__ import annotations

import asyncio
import itertools

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.judges import Judges
from pipeline.keys import Stream
from pipeline.messages import Outcome, Score, ScoredGroup
from pipeline.worker.lifecycle import WorkerContext, run_worker
from pipeline.worker.scored import AddingWork, begin
from pipeline.worker.stage import Stage


class JudgingWork(AddingWork):
    """Asks judges about groups."""

    def __init__(self, context: WorkerContext, judges: Judges) -> None:
        settings = context.config.scoring.judges
        super().__init__(context, judges, settings, hops=("judge_claimed", "judged"))
        self._judges = judges
        self._names = {judge.title for judge in settings}

    async def scores_of(self, group: ScoredGroup) -> tuple[Score, ...]:
        """Its scores with the rewards of judges."""
        scores = await self._judges.judge(group.rollout, group.scores)
        self._count(scores)
        return scores

    def _count(self, scores: tuple[Score, ...]) -> None:
        metrics = self.context.metrics
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
    work = JudgingWork(context, judges)
    try:
        if await begin(context, judges):
            await Stage(context, source=Stream.TO_JUDGE, work=work).run(may_claim=work.may_claim)
    finally:
        await judges.close()


def main(config: Config) -> int:
    """Exit code of a judge process."""
    return run_worker("judge", config, body)
