"""A scorer: rollouts in, rewards out.

In: `RolloutGroup`s. Out: `ScoredGroup`s. Reward functions run in processes of their own; this one
imports neither torch nor vllm.
"""

from __future__ import annotations

import asyncio
import itertools
import time

from pipeline.config import Config
from pipeline.keys import Stream
from pipeline.messages import Outcome, RolloutGroup, Score, ScoredGroup
from pipeline.rewards import RewardPool
from pipeline.streams import Entry, Lease
from pipeline.wire import decode
from pipeline.worker.lifecycle import WorkerContext, run_worker
from pipeline.worker.scored import entry_of
from pipeline.worker.stage import Stage


class ScoringWork:
    """Scores groups in a pool of reward processes."""

    def __init__(self, context: WorkerContext, pool: RewardPool) -> None:
        self._context = context
        self._pool = pool
        self._num_in_work = 0
        # One group more than there are processes, so that none waits for a round trip to Redis.
        self._max_in_work = context.config.scoring.num_processes + 1

    def capacity(self) -> int:
        """Groups that can be taken on now."""
        return self._max_in_work - self._num_in_work

    async def process(self, lease: Lease) -> Entry:
        """The scored group. Raises MessageError."""
        context = self._context
        self._num_in_work += 1
        try:
            rollout = decode(lease.payload, RolloutGroup, max_bytes=context.config.queues.max_payload_bytes)
            claimed = time.time()
            scores = await self._pool.score(rollout)
        finally:
            self._num_in_work -= 1
        self._count(rollout, scores)
        scored = ScoredGroup(
            rollout=rollout,
            scores=scores,
            scorer=context.worker_id,
            hops={"scorer_claimed": claimed, "scored": time.time()},
        )
        return entry_of(lease, scored)

    def _count(self, rollout: RolloutGroup, scores: tuple[Score, ...]) -> None:
        metrics = self._context.metrics
        metrics.tokens_in_total.inc(sum(len(completion) for completion in rollout.completions))
        for score in scores:
            for part in score.parts:
                metrics.reward_calls_total.labels(function=part.name, outcome=part.outcome.value).inc()
                if part.outcome is Outcome.OK and part.value is not None:
                    metrics.reward_value.labels(function=part.name).observe(part.value)
                    metrics.reward_accumulated.labels(function=part.name).inc(part.value)


async def _tell(context: WorkerContext, pool: RewardPool) -> None:
    """Say which function is at work, for those who ask why nothing moves. Never returns; cancel it."""
    while True:
        name, seconds = pool.longest_call or (None, 0.0)
        context.set_status(in_reward=name, in_reward_s=round(seconds, 1))
        await asyncio.sleep(context.config.worker.heartbeat_s)


async def body(context: WorkerContext) -> None:
    """Score until drained."""
    metrics = context.metrics
    pool = RewardPool(
        context.config.scoring,
        on_call=lambda name, seconds: metrics.reward_seconds.labels(function=name).observe(seconds),
    )
    for name, outcome in itertools.product(pool.stats, Outcome):
        metrics.reward_calls_total.labels(function=name, outcome=outcome.value)
    await pool.start()
    try:
        context.set_ready(True)
        work = ScoringWork(context, pool)
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(_tell(context, pool))
            await Stage(context, source=Stream.ROLLOUTS, work=work).run()
            telling.cancel()
    finally:
        await pool.close()


def main(config: Config) -> int:
    """Exit code of a scorer process."""
    return run_worker("scorer", config, body)
