"""How many workers of each stage but the trainer a run should have.

In: what was seen of it over the last seconds. Out: other numbers, with the reason; none where things
are well, or where it cannot be told yet. It looks at no clock and starts nothing.

Groups in flight are bounded, so those that cannot move on stand in front of the slowest stage. A
trainer that waits, and groups that wait for a worker all the time: that stage gets more workers. A
trainer that does not wait, and workers of whom one fewer could do what all do: one leaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config import AutoscaleSettings
from pipeline.keys import TAKEN_BY, Stream
from pipeline.messages import Json
from pipeline.roster import WaitCause
from pipeline.scaling import SCALED_ROLES

SOURCES: dict[str, Stream] = {role: stream for stream, role in TAKEN_BY.items() if role in SCALED_ROLES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of worker over the window.

    num_ours: that are to run here. num_ready, num_workers: of the whole run, at work and alive.
    slots: groups that one of them takes on at once. waiting: groups that no worker had claimed, the
    fewest. in_work: groups that were claimed, the mean.
    """

    num_ours: int
    num_ready: int
    num_workers: int
    slots: float
    waiting: int
    in_work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What is decided from.

    trainer_idle_ratio: share of the window in which the trainer waited; None where it is not known.
    window_s, since_change_s: how long was watched, and since when the numbers are what they are.
    """

    trainer_idle_ratio: float | None
    window_s: float
    since_change_s: float
    stages: Mapping[str, Stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Run so many workers of a role here."""

    role: str
    number: int
    reason: str


def decide(signals: Signals, settings: AutoscaleSettings) -> list[Decision]:
    """The numbers that are to change."""
    outside = [
        Decision(role=role, number=bounded, reason=f"the bounds are {low} and {high}")
        for role, stage in signals.stages.items()
        for low, high in [_bounds(role, settings)]
        if (bounded := min(max(stage.num_ours, low), high)) != stage.num_ours
    ]
    idle = signals.trainer_idle_ratio
    is_too_early = signals.since_change_s < settings.cool_down_s or signals.window_s < settings.window_s
    if outside or idle is None or is_too_early:
        return outside
    if idle > settings.trainer_idle_high:
        return _more(idle, signals, settings)
    return _fewer(signals, settings) if idle < settings.trainer_idle_low else []


def _more(idle: float, signals: Signals, settings: AutoscaleSettings) -> list[Decision]:
    """More workers where most groups wait, as many as would keep the trainer busy; at most twice as many at once."""
    role, stage = max(signals.stages.items(), key=lambda item: item[1].waiting)
    if stage.waiting == 0 or stage.num_ready < stage.num_workers:
        return []  # more of them would find nothing to do, or some are about to begin
    for_trainer = math.ceil(stage.num_workers / max(1 - idle, 0.01))
    for_waiting = stage.num_workers + math.ceil(stage.waiting / stage.slots)
    num_more = max(1, min(for_trainer, for_waiting, 2 * stage.num_workers) - stage.num_workers)
    reason = (
        f"the trainer waited {idle:.0%} of the last {signals.window_s:.0f} s, and at least {stage.waiting} groups "
        f"waited for a {role}"
    )
    return _changed(role, stage.num_ours + num_more, reason, signals.stages, settings)


def _fewer(signals: Signals, settings: AutoscaleSettings) -> list[Decision]:
    """One worker fewer where the others could do its work as well."""
    found: list[Decision] = []
    for role, stage in signals.stages.items():
        num_left = stage.num_ready - 1
        if stage.waiting or num_left < 1 or stage.in_work > settings.busy_target * num_left * stage.slots:
            continue
        reason = (
            f"the trainer did not wait in the last {signals.window_s:.0f} s, and {stage.in_work:.1f} groups in work "
            f"are enough for {num_left}"
        )
        found += _changed(role, stage.num_ours - 1, reason, signals.stages, settings)
    return found


def _changed(
    role: str, number: int, reason: str, stages: Mapping[str, Stage], settings: AutoscaleSettings
) -> list[Decision]:
    low, high = _bounds(role, settings)
    bounded = min(max(number, low), high)
    return [] if bounded == stages[role].num_ours else [Decision(role=role, number=bounded, reason=reason)]


def _bounds(role: str, settings: AutoscaleSettings) -> tuple[int, int]:
    low, high = (getattr(settings, f"{bound}_{role}s") for bound in ("min", "max"))
    return low, high


class IdleClock:
    """Seconds that a trainer has waited for groups, as its words add up.

    It counts a wait when the step after it is done, and says meanwhile how long it has been waiting;
    between the two it says less than before, which is no time that was given back.
    """

    def __init__(self) -> None:
        self._trainer = ""
        self._idle_s = 0.0

    def read(self, trainer: str, status: Mapping[str, Json]) -> float:
        """What it has waited by now. trainer: another one begins anew."""
        idle_s, waited_s = (
            float(value) if isinstance(value := status.get(name), (int, float)) else 0.0
            for name in ("idle_s", "waited_s")
        )
        now_s = idle_s + (waited_s if status.get("wait_cause") == WaitCause.GROUPS else 0.0)
        self._idle_s = max(self._idle_s, now_s) if trainer == self._trainer else now_s
        self._trainer = trainer
        return self._idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A run at one moment. at: monotonic seconds, of the trainer's word for its idle_s.

    idle_s: seconds that the trainer has waited since it began; None where there is none at work.
    waiting, in_work, num_ready, num_workers: by role.
    """

    at: float
    trainer: str
    idle_s: float | None
    waiting: Mapping[str, int]
    in_work: Mapping[str, int]
    num_ready: Mapping[str, int]
    num_workers: Mapping[str, int]


def signals_of(
    samples: Sequence[Sample], numbers: Mapping[str, int], slots: Mapping[str, float], *, since_change_s: float
) -> Signals:
    """What the samples of a window, oldest first and at least one, say together. numbers: those that run here."""
    first, last = samples[0], samples[-1]
    window_s = last.at - first.at
    stages = {
        role: Stage(
            num_ours=number,
            num_ready=last.num_ready[role],
            num_workers=last.num_workers[role],
            slots=slots[role],
            waiting=min(sample.waiting[role] for sample in samples),
            in_work=sum(sample.in_work[role] for sample in samples) / len(samples),
        )
        for role, number in numbers.items()
    }
    is_one_trainer = {sample.trainer for sample in samples} == {last.trainer}
    known = is_one_trainer and first.idle_s is not None and last.idle_s is not None and window_s > 0
    waited_s = (last.idle_s or 0.0) - (first.idle_s or 0.0)
    return Signals(
        trainer_idle_ratio=min(max(waited_s / window_s, 0.0), 1.0) if known else None,
        window_s=window_s,
        since_change_s=since_change_s,
        stages=stages,
    )
