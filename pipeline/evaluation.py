"""Evaluation: held-out prompts that pass through the same pipeline and are never trained on.

In: evaluation groups as they come back scored. Out: one report per round, under the weight
versions that really made the completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.feeder import prompt_entry
from pipeline.messages import PromptGroup, ScoredGroup
from pipeline.streams import Streams

_NUM_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """One round.

    weight_version_min, weight_version_max: of the tokens. reward_mean: over the num_scored completions
    that have a reward, of num_completions.
    samples: the first groups of the held-out data.
    """

    asked_version: int
    weight_version_min: int
    weight_version_max: int
    num_groups: int
    num_completions: int
    num_scored: int
    reward_mean: float
    rewards: dict[str, float]
    samples: tuple[ScoredGroup, ...] = ()

    def as_metrics(self) -> dict[str, float | dict[str, float]]:
        """For records and trackers. Names that users chose stand below a name of ours, never beside one."""
        return {
            "eval_reward": self.reward_mean,
            "eval_weight_version": float(self.weight_version_max),
            "eval_weight_version_min": float(self.weight_version_min),
            "eval_num_scored": float(self.num_scored),
            "eval_num_completions": float(self.num_completions),
            "eval_rewards": dict(self.rewards),
        }


@dataclass(slots=True)
class _Round:
    """Groups of one round that are back, by id."""

    version: int
    expected: set[str]
    groups: dict[str, ScoredGroup] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Evaluator:
    """Feeds rounds of evaluation and collects their results."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._rounds: dict[int, _Round] = {}
        self._finished: list[EvaluationReport] = []

    async def start(self, groups: Sequence[PromptGroup], version: int) -> None:
        """Feed one round, to be generated with `version` or newer."""
        if not groups:
            return
        self._rounds[version] = _Round(version=version, expected={group.group_id for group in groups})
        await self._streams.feed([prompt_entry(group) for group in groups], limit=0)

    def receive(self, group: ScoredGroup) -> None:
        """Take in one group that came back; of an unknown round it is ignored."""
        prompt = group.rollout.prompt
        for round_ in self._rounds.values():
            if prompt.group_id in round_.expected:
                round_.groups[prompt.group_id] = group
                self._close_if_complete(round_)
                return

    async def wait(self, version: int, *, poll_s: float = 1.0) -> None:
        """Until the round fed at `version` is complete, groups that died on the way excepted."""
        round_ = self._rounds.get(version)
        while round_ is not None and not round_.done.is_set():
            try:
                async with asyncio.timeout(poll_s):
                    await round_.done.wait()
            except TimeoutError:
                await self._give_up_on_the_dead()

    async def _give_up_on_the_dead(self) -> None:
        """Close rounds of which nothing is live any more."""
        ledger = await self._streams.ledger()
        if ledger.eval_live == 0:
            for round_ in list(self._rounds.values()):
                round_.expected = set(round_.groups)
                self._close_if_complete(round_)

    def _close_if_complete(self, round_: _Round) -> None:
        if round_.expected <= round_.groups.keys() and not round_.done.is_set():
            self._finished.append(_report(round_))
            self._rounds.pop(round_.version, None)
            round_.done.set()

    def take_reports(self) -> list[EvaluationReport]:
        """Reports of rounds that ended since the last call."""
        reports, self._finished = self._finished, []
        return reports


def _report(round_: _Round) -> EvaluationReport:
    groups = round_.groups.values()
    scores = [score for group in groups for score in group.scores]
    rewards = [score.reward for score in scores if score.reward is not None]
    versions = [version for group in groups for item in group.rollout.completions for version in item.token_versions]
    parts: dict[str, list[float]] = {}
    for score in scores:
        for part in score.parts:
            if part.value is not None:
                parts.setdefault(part.name, []).append(part.value)
    return EvaluationReport(
        asked_version=round_.version,
        weight_version_min=int(min(versions, default=round_.version)),
        weight_version_max=int(max(versions, default=round_.version)),
        num_groups=len(round_.groups),
        num_completions=len(scores),
        num_scored=len(rewards),
        reward_mean=float(np.mean(rewards)) if rewards else float("nan"),
        rewards={name: float(np.mean(values)) for name, values in parts.items()},
        samples=tuple(sorted(groups, key=lambda group: group.rollout.prompt.ordinal)[:_NUM_SAMPLES]),
    )
