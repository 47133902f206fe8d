"""Records of the fleet: a worker, what it is asked to do, and the run it belongs to.

In: what Redis holds. Out: frozen carriers. Ages and times are by the clock of Redis.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from pipeline.messages import Endpoints, Json

_BEATS_UNTIL_LOST = 4
_GRACE_S = 1.0
MICROSECONDS = 1e6
_UNSAID: Mapping[str, Any] = MappingProxyType(
    {"role": "unknown", "host": "", "pid": 0, "address": "", "heartbeat_s": 2.0, "status": {}}
)


def new_worker_id(role: str) -> str:
    """Readable and unique: role, host, process, and eight random hex digits."""
    host = socket.gethostname().split(".", maxsplit=1)[0] or "host"
    return f"{role}-{host}-{os.getpid()}-{secrets.token_hex(4)}"


class WaitCause(StrEnum):
    """What kind of thing a worker waits for. The words beside it are for people; conclusions are drawn from this."""

    GROUPS = "groups"
    WEIGHTS = "weights"
    REDIS = "redis"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker as the registry knows it.

    address: host:port of its HTTP endpoints. heartbeat_s: promised interval of signs of life.
    status: what it last said of itself. started_at: Unix seconds by Redis's clock, 0 before the
    first beat. age_s: since the last beat. is_alive: False after several beats were missed.
    """

    worker_id: str
    role: str
    host: str
    pid: int
    address: str = ""
    heartbeat_s: float = 2.0
    status: Mapping[str, Json] = field(default_factory=dict)
    started_at: float = 0.0
    age_s: float = 0.0
    is_alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What a worker is asked to do, and what the run knows.

    paused: claim nothing new. stop_reason: the run is over; drain and exit. drain: this worker is
    to leave. weight_version: newest that the trainer has. run_id: changes when Redis lost the run.
    """

    paused: bool = False
    stop_reason: str | None = None
    drain: bool = False
    weight_version: int | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is true of a run as a whole.

    run_id: None when nobody has joined yet. at, created_at: Unix seconds by Redis's clock.
    stop_reason: why it is over. trainer: worker id of the trainer that holds the lock.
    has_teachers, has_judges: whether it has these stages. failures: role -> why the last worker of it has failed,
    where none has started since.
    """

    at: float
    run_id: str | None = None
    created_at: float = 0.0
    weight_version: int | None = None
    is_paused: bool = False
    stop_reason: str | None = None
    trainer: str | None = None
    has_teachers: bool = False
    has_judges: bool = False
    failures: Mapping[str, str] = field(default_factory=dict)


def record_of(worker: WorkerInfo) -> str:
    """What a worker says of itself, as JSON; `read_worker` reads it."""
    record = {
        "role": worker.role,
        "host": worker.host,
        "pid": worker.pid,
        "address": worker.address,
        "heartbeat_s": worker.heartbeat_s,
        "status": dict(worker.status),
    }
    return json.dumps(record, separators=(",", ":"))


def read_worker(worker_id: str, value: bytes, now_us: int) -> tuple[WorkerInfo, str] | None:
    """The worker that an entry of the registry describes, and its last beat; None for what no worker wrote.

    value: beat and start in microseconds of Redis's clock, then the record. A worker of another
    version may leave something out; it is there all the same.
    """
    try:
        beat, started, record = value.decode().split(" ", 2)
        age_s, started_at = max(0.0, (now_us - int(beat)) / MICROSECONDS), int(started) / MICROSECONDS
        said = _UNSAID | json.loads(record)
        patience_s = _BEATS_UNTIL_LOST * float(said["heartbeat_s"]) + _GRACE_S
        worker = WorkerInfo(
            worker_id=worker_id,
            role=str(said["role"]),
            host=str(said["host"]),
            pid=int(said["pid"]),
            address=str(said["address"]),
            heartbeat_s=float(said["heartbeat_s"]),
            status=dict(said["status"]),
            started_at=started_at,
            age_s=age_s,
            is_alive=age_s <= patience_s,
        )
    except (ValueError, TypeError):
        return None
    return worker, beat


def endpoints_text(endpoints: Endpoints) -> str:
    """Where a publisher is, as JSON; `read_endpoints` reads it."""
    return json.dumps(asdict(endpoints))


def read_endpoints(value: bytes | str | None) -> Endpoints | None:
    """Where a publisher is; None for nothing, and for what none has written."""
    try:
        said = json.loads(value or b"null")
        endpoints = Endpoints(**said)
    except (ValueError, TypeError):
        return None
    is_text = all(isinstance(getattr(endpoints, item.name), str) for item in fields(endpoints))
    return endpoints if is_text else None
