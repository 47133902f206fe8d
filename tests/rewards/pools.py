"""Rollouts to score, and pools to score them with."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from pipeline.config import RewardSettings, ScoringSettings
from pipeline.messages import Json, Prompt, RolloutGroup
from pipeline.rewards import RewardPool
from tests.groups import make_completion, make_prompt, make_rollout


def rollout(
    *texts: str, prompt: Prompt = "a prompt", columns: dict[str, Json] | None = None, num_tokens: int = 4
) -> RolloutGroup:
    """A group with these completions."""
    group = make_rollout(make_prompt(group_size=len(texts), columns=columns))
    return dataclasses.replace(
        group,
        prompt=dataclasses.replace(group.prompt, prompt=prompt),
        completions=tuple(make_completion(num_tokens, text=text) for text in texts),
    )


def reward(function: str, **settings: object) -> RewardSettings:
    """Settings of a function in `tests.rewards.samples`."""
    return RewardSettings.model_validate({"function": f"tests.rewards.samples:{function}", **settings})


@asynccontextmanager
async def running_pool(
    *rewards: RewardSettings,
    num_processes: int = 1,
    on_failure: Literal["unscored", "zero"] = "unscored",
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[RewardPool]:
    """A pool with its processes started."""
    settings = ScoringSettings(rewards=list(rewards), num_processes=num_processes, on_failure=on_failure)
    pool = RewardPool(settings, clock=clock)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def rewards_of(pool: RewardPool, group: RolloutGroup) -> Sequence[float | None]:
    """Only the sums."""
    return [score.reward for score in await pool.score(group)]


async def until_busy(pool: RewardPool) -> None:
    """Until no process waits for a call."""
    async with asyncio.timeout(180):
        while pool.num_idle:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.001)
