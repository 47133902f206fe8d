"""Runs with names like that of a run that has no trainer yet: perhaps its name was misspelled.

In: a worker that waits. Out: one line in its log, at most. It changes nothing.
"""

from __future__ import annotations

import asyncio
from difflib import get_close_matches

from redis.exceptions import RedisError

from pipeline.errors import few
from pipeline.roster import WaitCause
from pipeline.worker.context import WorkerContext

_FOR_A_TRAINER = frozenset({"generator", "scorer", "teacher", "judge"})
_PATIENCE_S, _LOOK_EVERY_S = 5.0, 0.5


async def name_similar_runs(context: WorkerContext) -> None:
    """Ends when there are weights, or a wait has lasted without any and it was said what else there is."""
    run = context.config.run.name
    if context.role not in _FOR_A_TRAINER:
        return
    while context.run_version is None:
        if context.state.waited_s < _PATIENCE_S or context.state.wait_cause is WaitCause.REDIS:
            await asyncio.sleep(_LOOK_EVERY_S)
            continue
        try:
            similar = get_close_matches(run, await context.fleet.other_runs())
        except (RedisError, OSError):  # not allowed to look, or away
            return
        if similar:
            context.log.warning("no_trainer_yet", run=run, similar_runs=few(similar), advice="is run.name right?")
        return
