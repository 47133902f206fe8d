"""States of a run for tests of what is said about them: depths of streams, workers, what limits."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.fleet import WorkerInfo
from pipeline.keys import Stream
from pipeline.messages import Json
from pipeline.queues.ledger import Depth
from pipeline.roster import RunFacts
from pipeline.run.limits import Limit, limiting_stage

RUNNING: dict[str, Json] = {"ready": True, "state": "running", "progress_age_s": 0.5, "idle_ratio": 0.5}


def depths(
    prompts: int = 0, rollouts: int = 0, scored: int = 0, *, pending: int = 0, **more: int
) -> dict[Stream, Depth]:
    """more: of the stages that only some runs have, as in to_teach=3."""
    named = {"prompts": prompts, "rollouts": rollouts, **more, "scored": scored}
    lengths = {stream: named[stream] for stream in Stream if stream in named}
    return {
        stream: Depth(
            length=length,
            pending=min(pending, length),
            backlog=length - min(pending, length),
            oldest_pending_s=70.0,
            oldest_waiting_s=3.0,
        )
        for stream, length in lengths.items()
    }


def worker(role: str, *, is_alive: bool = True, **status: Json) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"{role}-a", role=role, host="h", pid=1, is_alive=is_alive, status={**RUNNING, **status}
    )


def everyone(**of_all: Json) -> list[WorkerInfo]:
    return [worker(role, **of_all) for role in ("generator", "scorer", "trainer")]


def limit(streams: Mapping[Stream, Depth], workers: list[WorkerInfo], **facts: object) -> Limit:
    return limiting_stage(streams, workers, RunFacts(at=0.0, **{"run_id": "x", **facts}))  # type: ignore[arg-type]
