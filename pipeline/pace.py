"""Which stage sets the pace of training, over the steps of the last minute.

In: of every step, how long the trainer waited for it and when its groups passed each stage. Out: one
stage and what it is concluded from; the trainer's log, `status` and the gauges all say this one.

Groups in flight are bounded, so those that cannot move on stand where it is slow: the stage in which
groups spend most of their time is the one that a waiting trainer waits for.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.messages import Json, ScoredGroup
from pipeline.rates import WINDOW_S

WAITS_FOR_GROUPS = "scored groups"  # what a trainer says then
# A trainer that waits less than this share of the time is the slowest stage itself.
_WAITING_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One step. ended_at: monotonic seconds. generation_s, scoring_s: mean over its groups, queues included."""

    ended_at: float
    wall_s: float
    waited_s: float
    generation_s: float
    scoring_s: float


class Pace:
    """The steps of the last minute; of slower ones the last two. The first counts only while it is the only one.

    It waits for workers that are still starting, which says nothing of how fast they are.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._num_steps = 0

    def step(self, groups: Sequence[ScoredGroup], *, ended_at: float, wall_s: float, waited_s: float) -> None:
        """One more step. wall_s: since the step before."""
        if self._num_steps == 1:
            self._steps.clear()
        self._num_steps += 1
        generation_s, scoring_s = zip(*(_stage_times(group) for group in groups), strict=True)
        self._steps.append(
            _Step(
                ended_at=ended_at,
                wall_s=wall_s,
                waited_s=waited_s,
                generation_s=statistics.fmean(generation_s),
                scoring_s=statistics.fmean(scoring_s),
            )
        )
        while len(self._steps) > 2 and ended_at - self._steps[0].ended_at >= WINDOW_S:
            self._steps.popleft()

    def describe(self) -> dict[str, Json]:
        """Fields for the registry, once there was a step. limited_by: generator, scorer or trainer."""
        wall_s = sum(step.wall_s for step in self._steps)
        waited_ratio = min(1.0, sum(step.waited_s for step in self._steps) / max(wall_s, 1e-9))
        generation_s = statistics.fmean(step.generation_s for step in self._steps)
        scoring_s = statistics.fmean(step.scoring_s for step in self._steps)
        slower = "scorer" if scoring_s > generation_s else "generator"
        return {
            "limited_by": slower if waited_ratio > _WAITING_SHARE else "trainer",
            "waited_ratio": round(waited_ratio, 3),
            "generation_s": round(generation_s, 3),
            "scoring_s": round(scoring_s, 3),
            "pace_s": round(wall_s, 1),
        }


def _stage_times(group: ScoredGroup) -> tuple[float, float]:
    """Seconds from fed to generated and from there to scored, by the clocks of the machines."""
    hops = {**group.rollout.prompt.hops, **group.rollout.hops, **group.hops}
    fed = hops.get("fed", 0.0)
    generated = max(hops.get("generated", fed), fed)
    return generated - fed, max(0.0, hops.get("scored", generated) - generated)
