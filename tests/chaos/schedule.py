"""Which faults come in which order: the same for the same seed.

In: a seed and how many. Out: rounds of faults; those of one round strike at the same time. Every
kind comes before any comes twice as often as it should.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import StrEnum

_MOST_AT_ONCE = 3


class Fault(StrEnum):
    """What can go wrong."""

    KILL_GENERATOR = "kill_generator"
    KILL_SCORER = "kill_scorer"
    KILL_TRAINER = "kill_trainer"
    KILL_EXPORTER = "kill_exporter"
    STALL_GENERATOR = "stall_generator"
    STALL_SCORER = "stall_scorer"
    STALL_TRAINER = "stall_trainer"
    REPLACE_TRAINER = "replace_trainer"
    DRAIN_GENERATOR = "drain_generator"
    DRAIN_SCORER = "drain_scorer"
    KILL_REDIS = "kill_redis"
    FREEZE_REDIS = "freeze_redis"
    FORGET_SCRIPTS = "forget_scripts"
    CUT_WEIGHTS = "cut_weights"
    FILL_DISK = "fill_disk"
    SKEW_GENERATOR = "skew_generator"
    SKEW_SCORER = "skew_scorer"
    SLOW_REWARD = "slow_reward"
    FAILING_REWARD = "failing_reward"
    BAD_PROMPT = "bad_prompt"
    BAD_ROLLOUT = "bad_rollout"
    BAD_SCORE = "bad_score"


# How often each comes in one pass over all; those that are not named come once.
_TIMES = {
    Fault.KILL_GENERATOR: 9,
    Fault.KILL_SCORER: 7,
    Fault.KILL_TRAINER: 2,
    Fault.KILL_EXPORTER: 2,
    Fault.KILL_REDIS: 2,
    Fault.STALL_GENERATOR: 2,
    Fault.STALL_SCORER: 2,
    Fault.DRAIN_GENERATOR: 2,
}
# Two that need the same thing whole do not come together.
_ALONE = {
    Fault.KILL_TRAINER: "trainer",
    Fault.STALL_TRAINER: "trainer",
    Fault.REPLACE_TRAINER: "trainer",
    Fault.FILL_DISK: "trainer",
    Fault.KILL_REDIS: "redis",
    Fault.FREEZE_REDIS: "redis",
    Fault.FORGET_SCRIPTS: "redis",
    Fault.SLOW_REWARD: "reward",
    Fault.FAILING_REWARD: "reward",
}


def rounds(seed: int, num_faults: int, *, at_once: int = _MOST_AT_ONCE) -> Iterator[tuple[Fault, ...]]:
    """Rounds of up to `at_once` faults, until there were `num_faults`."""
    chance = random.Random(seed)
    faults = _endless(chance)
    waiting: list[Fault] = []
    num_left = num_faults
    while num_left:
        wanted = min(num_left, chance.randint(1, at_once))
        chosen: list[Fault] = []
        skipped: list[Fault] = []
        while len(chosen) < wanted:
            fault = waiting.pop(0) if waiting else next(faults)
            (chosen if _goes_with(fault, chosen) else skipped).append(fault)
        waiting = [*skipped, *waiting]
        num_left -= wanted
        yield tuple(chosen)


def _goes_with(fault: Fault, others: list[Fault]) -> bool:
    taken = {_ALONE.get(other, other) for other in others}
    return _ALONE.get(fault, fault) not in taken


def _endless(chance: random.Random) -> Iterator[Fault]:
    while True:
        deck = [fault for fault in Fault for _ in range(_TIMES.get(fault, 1))]
        chance.shuffle(deck)
        yield from deck
