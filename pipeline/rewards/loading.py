"""Reward settings, checked: every function exists and can be called as a reward.

In: `[[scoring.rewards]]`, rows of the data. Out: `Reward`s. The check imports the functions in a child process, so
that neither their imports nor their mistakes reach the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.config import RewardSettings
from pipeline.errors import RewardLoadError
from pipeline.messages import Json, Prompt
from pipeline.rewards import frames
from pipeline.rewards.functions import short_name
from pipeline.rewards.process import RewardProcess, order_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function by name.

    function: as in the settings. weight: factor in the sum. kwargs: passed to every call.
    """

    name: str
    function: str
    weight: float
    timeout_s: float
    kwargs: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A row that rewards are tried on. where: file and row, for messages. columns: all but the prompt."""

    where: str
    prompt: Prompt
    columns: Mapping[str, Json]


def load_rewards(
    settings: Sequence[RewardSettings], rows: Sequence[TrialRow] = (), *, may_be_none: bool = False
) -> list[Reward]:
    """The rewards of a run, each importable, of the right shape, and able to deal with these rows.

    Functions of the user are not called. Raises RewardLoadError.
    """
    rewards = name_rewards(settings, may_be_none=may_be_none)
    if not rewards:
        return []
    # The caller may or may not run an event loop already; a thread of its own serves both.
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(asyncio.run, _check(order(rewards, rows))).result()
    return rewards


def name_rewards(settings: Sequence[RewardSettings], *, may_be_none: bool = False) -> list[Reward]:
    """The rewards as the settings have them; nothing is imported yet. may_be_none: something else scores too."""
    if not settings and not may_be_none:
        raise RewardLoadError(
            'scoring.rewards is empty: name at least one function, for example function = "exact_match" '
            "in a [[scoring.rewards]] table."
        )
    rewards = [
        Reward(
            name=reward.name or short_name(reward.function),
            function=reward.function,
            weight=reward.weight,
            timeout_s=reward.timeout_s,
            kwargs=dict(reward.kwargs),
        )
        for reward in settings
    ]
    seen: set[str] = set()
    for reward in rewards:
        if reward.name in seen:
            raise RewardLoadError(f"scoring.rewards: two are called {reward.name!r}: give one of them another `name`.")
        seen.add(reward.name)
    return rewards


def order(rewards: Sequence[Reward], rows: Sequence[TrialRow] = ()) -> frames.Frame:
    """What a reward process is told to load, and to try it on."""
    trials = [{"where": row.where, "prompt": row.prompt, "columns": dict(row.columns)} for row in rows]
    return order_for([(reward.function, reward.kwargs) for reward in rewards], trials)


async def _check(order: frames.Frame) -> None:
    process = RewardProcess(order)
    try:
        await process.load()
    finally:
        process.kill()
