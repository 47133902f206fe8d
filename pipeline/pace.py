"""Which stage sets the pace of training, over the steps of the last minute.

In: of every step, how long the trainer waited for it and when its groups passed each stage. Out: one
stage and what it is concluded from; the trainer's log, `status` and the gauges all say this one.

Groups in flight are bounded, so those that cannot move on stand where it is slow: the stage in which
groups spend most of their time is the one that a waiting trainer waits for.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.messages import Json, ScoredGroup
from pipeline.rates import WINDOW_S

STAGE_TIMES = {"generator": "generation_s", "scorer": "scoring_s", "teacher": "teaching_s", "judge": "judging_s"}
"""Role -> field that says how long groups were in its stage."""
_HOPS = {"generator": "generated", "scorer": "scored", "teacher": "taught", "judge": "judged"}
# A trainer that waits less than this share of the time is the slowest stage itself.
_WAITING_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One step. ended_at: monotonic seconds. stage_s: by role, mean over its groups, queues included."""

    ended_at: float
    wall_s: float
    waited_s: float
    stage_s: Mapping[str, float]


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
        times = [_stage_times(group) for group in groups]
        self._steps.append(
            _Step(
                ended_at=ended_at,
                wall_s=wall_s,
                waited_s=waited_s,
                stage_s={role: statistics.fmean(each.get(role, 0.0) for each in times) for role in set().union(*times)},
            )
        )
        while len(self._steps) > 2 and ended_at - self._steps[0].ended_at >= WINDOW_S:
            self._steps.popleft()

    def describe(self) -> dict[str, Json]:
        """Fields for the registry, once there was a step. limited_by: the role of one stage."""
        wall_s = sum(step.wall_s for step in self._steps)
        waited_ratio = min(1.0, sum(step.waited_s for step in self._steps) / max(wall_s, 1e-9))
        seen = [role for role in STAGE_TIMES if any(role in step.stage_s for step in self._steps)]
        stage_s = {role: statistics.fmean(step.stage_s.get(role, 0.0) for step in self._steps) for role in seen}
        slowest = max(seen, key=lambda role: stage_s[role])
        return {
            "limited_by": slowest if waited_ratio > _WAITING_SHARE else "trainer",
            "waited_ratio": round(waited_ratio, 3),
            **{STAGE_TIMES[role]: round(seconds, 3) for role, seconds in stage_s.items()},
            "pace_s": round(wall_s, 1),
        }


def _stage_times(group: ScoredGroup) -> dict[str, float]:
    """Seconds in each stage that the group has passed, by its role and by the clocks of the machines."""
    hops = {**group.rollout.prompt.hops, **group.rollout.hops, **group.hops}
    before = hops.get("fed", 0.0)
    times = {"generator": 0.0, "scorer": 0.0}
    for role, hop in _HOPS.items():
        if hop in hops:
            times[role] = max(0.0, hops[hop] - before)
            before = max(before, hops[hop])
    return times
