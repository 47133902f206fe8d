"""A teacher: scored groups in, the same with a teacher's logprobs out.

In: `ScoredGroup`s. Out: `ScoredGroup`s. Its models are never trained and never sample.
"""

from __future__ import annotations

import asyncio
import dataclasses

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.keys import Stream
from pipeline.messages import Score, ScoredGroup
from pipeline.teachers import Teachers
from pipeline.worker.lifecycle import WorkerContext, run_worker
from pipeline.worker.scored import AddingWork, begin
from pipeline.worker.stage import Stage


class TeachingWork(AddingWork):
    """Asks teachers about groups."""

    def __init__(self, context: WorkerContext, teachers: Teachers) -> None:
        settings = context.config.scoring.teachers
        super().__init__(context, teachers, settings, hops=("teacher_claimed", "taught"))
        self._teachers = teachers

    async def scores_of(self, group: ScoredGroup) -> tuple[Score, ...]:
        """Its scores with the teachers' logprobs. Raises ScoringError."""
        lessons = await self._teachers.lessons(group.rollout)
        if lessons is None:
            return group.scores
        return tuple(
            dataclasses.replace(score, teacher_logprobs=lesson.logprobs, teacher_top=lesson.top)
            for score, lesson in zip(group.scores, lessons, strict=True)
        )


async def body(context: WorkerContext) -> None:
    """Teach until drained."""
    if not context.config.scoring.teachers:
        raise ConfigError(
            "scoring.teachers is empty: a teacher has nothing to ask; name one in a [[scoring.teachers]] table"
        )
    with context.busy_with("loading its models"):
        teachers = await asyncio.to_thread(Teachers, context.config)  # which imports much
    work = TeachingWork(context, teachers)
    try:
        if await begin(context, teachers):
            await Stage(context, source=Stream.TO_TEACH, work=work).run(may_claim=work.may_claim)
    finally:
        await teachers.close()


def main(config: Config) -> int:
    """Exit code of a teacher process."""
    return run_worker("teacher", config, body)
