"""Reward functions: user code that turns completions into numbers, kept where it can do no harm.

In: `RolloutGroup`. Out: one `Score` for each completion. User code runs only in child processes
that may hang, crash or print; it is never imported into the worker itself.

    scorer -- RewardPool -+- RewardProcess == socket == child: the functions, loaded
                          +- RewardProcess == socket == child ...

Names are resolved on first use, so that a child imports no more than it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.rewards.loading import Reward, TrialRow, load_rewards
    from pipeline.rewards.pool import RewardPool, RewardStats

__all__ = ["Reward", "RewardPool", "RewardStats", "TrialRow", "load_rewards"]

_HOMES = {
    "Reward": "pipeline.rewards.loading",
    "TrialRow": "pipeline.rewards.loading",
    "load_rewards": "pipeline.rewards.loading",
    "RewardPool": "pipeline.rewards.pool",
    "RewardStats": "pipeline.rewards.pool",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
