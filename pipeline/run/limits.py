"""Which stage limits the rate of a run, or blocks it, and why.

In: streams, workers and facts of one instant. Out: one stage and one sentence. What sets the pace is
what the trainer concludes from the last minute (`pipeline.pace`); where nothing moves at all, the
first thing on the way that cannot is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import few
from pipeline.keys import TAKEN_BY, Stream
from pipeline.messages import Json
from pipeline.queues.leases import Death
from pipeline.queues.ledger import Depth
from pipeline.roster import RunFacts, WaitCause, WorkerInfo

_STALE_WEIGHTS_RATIO = 0.3
_STALLED_AFTER_S = 35.0  # log and alert, which wait a little themselves, then name the stage within a minute
_MAX_REASON = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What holds the run back.

    stage: role of a stage, weights, control or redis; None when nothing does. reason: one
    sentence. is_blocked: nothing will move until this is mended.
    """

    stage: str | None
    reason: str
    is_blocked: bool = False


def limiting_stage(
    streams: Mapping[Stream, Depth],
    workers: Sequence[WorkerInfo],
    facts: RunFacts,
    last_death: Death | None = None,
    *,
    server_refusal: str = "",
) -> Limit:
    """The stage that limits or blocks the run.

    streams: that the run has, in order of flow. server_refusal: why the server takes no writes.
    """
    alive = [worker for worker in workers if worker.is_alive and worker.role != "exporter"]
    return (
        _without_writes(server_refusal, facts)
        or _without_run(alive, facts)
        or _missing_worker(streams, workers, alive, facts)
        or _lost_groups(alive, last_death)
        or _waiting_worker(streams, alive)
        or _lost_holder(streams, workers)
        or _stalled(streams, alive)
        or _slowest(streams, alive)
    )


def _stages(streams: Mapping[Stream, Depth]) -> list[tuple[Stream, str]]:
    return [(stream, TAKEN_BY[stream]) for stream in streams]


def _without_writes(refusal: str, facts: RunFacts) -> Limit | None:
    """Nobody can hand anything over, nor say that it is alive."""
    if not refusal or facts.run_id is None or facts.stop_reason is not None:
        return None
    reason = f"the server takes no writes, since {refusal}; workers wait for it and lose nothing"
    return Limit(stage="redis", reason=reason, is_blocked=True)


def _without_run(alive: Sequence[WorkerInfo], facts: RunFacts) -> Limit | None:
    if not alive and facts.stop_reason is not None:
        return Limit(stage=None, reason=f"the run is over: {facts.stop_reason}")
    if not alive:
        what = "nobody has joined this run" if facts.run_id is None else unfinished("no worker is alive")
        return Limit(stage=None, reason=what, is_blocked=True)
    if facts.is_paused:
        return Limit(stage="control", reason="the run is paused; `rollstream resume` goes on", is_blocked=True)
    return None


def unfinished(what: str, progress: str = "") -> str:
    """What is said of a run that stands still before its end. progress: as in "3 of 10 steps are done"."""
    done = f" ({progress})" if progress else ""
    return f"{what}, and the run is not over{done}: started again, it goes on from its last checkpoint"


def _missing_worker(
    streams: Mapping[Stream, Depth], workers: Sequence[WorkerInfo], alive: Sequence[WorkerInfo], facts: RunFacts
) -> Limit | None:
    roles = {worker.role for worker in alive}
    for stream, role in reversed(_stages(streams)):
        if role in roles:
            continue
        lost = sum(worker.role == role for worker in workers)
        gone = f" ({lost} lost)" if lost else ""
        waiting = f"; {streams[stream].length} groups wait in {stream.value}" if streams[stream].length else ""
        failed = f"; the last one failed: {facts.failures[role][:_MAX_REASON]}" if role in facts.failures else ""
        return Limit(stage=role, reason=f"no {role} is alive{gone}{waiting}{failed}", is_blocked=True)
    return None


def _lost_groups(alive: Sequence[WorkerInfo], last_death: Death | None) -> Limit | None:
    """A step's worth of groups and more died or was filtered, and the trainer still waits for enough."""
    for trainer in (worker for worker in alive if worker.role == "trainer"):
        names = ("dead_in_step", "dropped_in_step", "held", "groups_per_step")
        dead, dropped, held, wanted = (int(_number(trainer, name)) for name in names)
        if not 0 < wanted <= dead + dropped:
            continue
        held_back = f"and {held} of {wanted} groups for the next step are there"
        if last_death is None or dropped > dead:
            reason = f"{dropped} groups were filtered since the last step, {held_back}: look at their rewards"
            return Limit(stage="scorer", reason=reason, is_blocked=held == 0)
        stage = TAKEN_BY[last_death.stream]
        why = f"{last_death.reason[:_MAX_REASON]} (`rollstream streams dead-letters` shows all)"
        return Limit(
            stage=stage,
            reason=f"{dead} groups died since the last step, {held_back}; the last died in {last_death.stream}: {why}",
            is_blocked=held == 0,
        )
    return None


def _waiting_worker(streams: Mapping[Stream, Depth], alive: Sequence[WorkerInfo]) -> Limit | None:
    """A stage whose workers all wait for something other than work, though there is work."""
    for stream, role in _stages(streams):
        ours = [worker for worker in alive if worker.role == role]
        waits = [worker.status.get("waiting_for") for worker in ours]
        causes = [worker.status.get("wait_cause") for worker in ours]
        if role == "trainer" and not _is_ready(alive, role):
            return Limit(stage=role, reason=f"the trainer waits for {waits[0]}" if waits[0] else "the trainer starts")
        if streams[stream].backlog == 0 or any(cause in (None, WaitCause.GROUPS) for cause in causes):
            continue  # Nothing to do, someone at work, or only just told of the work there is.
        stage = "weights" if all(cause == WaitCause.WEIGHTS for cause in causes) else role
        who = f"the {role}" if len(waits) == 1 else f"all {len(waits)} {role}s"
        verb = "waits" if len(waits) == 1 else "wait"
        return Limit(
            stage=stage,
            reason=f"{streams[stream].backlog} groups wait in {stream.value}, but {who} {verb} for {waits[0]}",
            is_blocked=_still_s(alive) > _STALLED_AFTER_S,
        )
    return None


def _stalled(streams: Mapping[Stream, Depth], alive: Sequence[WorkerInfo]) -> Limit | None:
    """Workers are alive and nobody has moved anything for long."""
    age_s = _still_s(alive)
    if age_s <= _STALLED_AFTER_S:
        return None
    for stream, role in reversed(_stages(streams)):
        depth = streams[stream]
        if depth.pending and not _is_collecting(role, alive):
            return Limit(
                stage=role,
                reason=f"nothing has moved for {age_s:.0f} s: the {role} stage holds {depth.pending} groups of "
                f"{stream.value}, the oldest for {depth.oldest_pending_s:.0f} s{_longest_call(role, alive)}",
                is_blocked=True,
            )
    return Limit(
        stage="trainer",
        reason=f"nothing has moved for {age_s:.0f} s: no group is in work and the trainer feeds none",
        is_blocked=True,
    )


def _is_collecting(role: str, alive: Sequence[WorkerInfo]) -> bool:
    """Whether what this stage holds is too little for it to begin: a trainer with a part of a batch."""
    causes = [worker.status.get("wait_cause") for worker in alive if worker.role == role]
    return role == "trainer" and all(cause == WaitCause.GROUPS for cause in causes)


def _longest_call(role: str, alive: Sequence[WorkerInfo]) -> str:
    """The reward function that a scorer has been in for long, or what a teacher or judge has asked for long."""
    busy = [worker for worker in alive if worker.role == role and worker.status.get("in_reward")]
    longest = max(busy, key=lambda worker: _number(worker, "in_reward_s"), default=None)
    if longest is None:
        return ""
    name, seconds = longest.status["in_reward"], f"{_number(longest, 'in_reward_s'):.0f} s"
    if role == "scorer":
        return f"; the reward {name} has not returned for {seconds}"
    return f"; {name} of scoring.{role}s has not answered for {seconds}"


def _lost_holder(streams: Mapping[Stream, Depth], workers: Sequence[WorkerInfo]) -> Limit | None:
    """Groups that nobody may touch yet, because a worker that is gone has claimed them."""
    lost = {worker.worker_id for worker in workers if not worker.is_alive}
    for stream, role in reversed(_stages(streams)):
        held = {holder: number for holder, number in streams[stream].holders.items() if holder in lost}
        if held and _pace(workers).get("limited_by") != "trainer":
            return Limit(
                stage=role,
                reason=f"{few(held)}, lost, still holds {sum(held.values())} of {streams[stream].length} groups of "
                f"{stream.value}; others take them over when the lease lapses (queues.lease_s)",
            )
    return None


def _slowest(streams: Mapping[Stream, Depth], alive: Sequence[WorkerInfo]) -> Limit:
    for worker in alive:
        if _number(worker, "busy_s") > _STALLED_AFTER_S:
            what, seconds = worker.status.get("busy_with"), _number(worker, "busy_s")
            return Limit(stage=worker.role, reason=f"the {worker.role} has been busy with {what} for {seconds:.0f} s")
    pace = _pace(alive)
    if not pace:
        return _fullest(streams)
    stage = str(pace["limited_by"])
    waited = f"in the last {pace['pace_s']:.0f} s the trainer waited {pace['waited_ratio']:.0%} of the time"
    if stage == "trainer":
        return Limit(stage=stage, reason=waited)
    stale = [worker for worker in alive if worker.status.get("idle_cause") == "stale_weights"]
    stale = [worker for worker in stale if _number(worker, "idle_ratio") > _STALE_WEIGHTS_RATIO]
    if stage == "generator" and stale and len(stale) == sum(worker.role == "generator" for worker in alive):
        return Limit(stage="weights", reason=f"{waited}, and generators wait for newer weights much of it")
    words = (("generation_s", "until generated"), ("scoring_s", "until scored"))
    more = (("teaching_s", "with teachers"), ("judging_s", "with judges"))
    spent = ", ".join(f"{pace[name]:.1f} s {word}" for name, word in (*words, *more) if name in pace)
    return Limit(stage=stage, reason=f"{waited}; groups spent {spent}")


def _pace(workers: Sequence[WorkerInfo]) -> Mapping[str, Json]:
    """What the trainer concludes from its last steps; empty before the first."""
    said = (worker.status for worker in workers if worker.role == "trainer" and worker.is_alive)
    return next((status for status in said if "limited_by" in status), {})


def _fullest(streams: Mapping[Stream, Depth]) -> Limit:
    """Before the first step there is nothing to go by but the queues of this instant."""
    before_trainer = {stream: depth.length for stream, depth in streams.items() if stream is not Stream.SCORED}
    stream = max(before_trainer, key=lambda name: before_trainer[name])
    if not before_trainer[stream]:
        return Limit(stage="trainer", reason="no group is on its way: the trainer is feeding, or at its end")
    reason = f"{before_trainer[stream]} groups are in {stream.value}, and no step is done yet"
    return Limit(stage=TAKEN_BY[stream], reason=reason)


def _still_s(alive: Sequence[WorkerInfo]) -> float:
    """Seconds in which nobody has moved anything, nor was in the middle of one long piece of work."""
    return min(0.0 if worker.status.get("busy_with") else _number(worker, "progress_age_s") for worker in alive)


def _is_ready(alive: Sequence[WorkerInfo], role: str) -> bool:
    return any(worker.status.get("ready") for worker in alive if worker.role == role)


def _number(worker: WorkerInfo, name: str) -> float:
    value = worker.status.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
