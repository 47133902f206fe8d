"""A group in the hands of one worker, and what keeps it there.

In: entries of a stream. Out: leases, renewed in the background while work goes on. A lease that
is lost is told, never taken back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol

from redis.exceptions import RedisError

from pipeline.keys import Stream

RawFields = Mapping[bytes, bytes]


_MAX_DIGITS = 18
# The fields of a training group, in the order in which the scripts write them.
_NAMES = [b"group_id", b"attempt", b"weight_version", b"created_at", b"schema", b"payload"]


class Moved(StrEnum):
    """What became of a hand-over.

    MOVED: the group is on the next stream. REFUSED: the lease was lost, the result is void.
    FULL: the next stream has no room; the lease is still held, try again later.
    """

    MOVED = "moved"
    REFUSED = "refused"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A group to be put on a stream.

    weight_version: fed at, or sampled with. payload: from `pipeline.wire`. ordinal: position in the
    feeding order; given by the feeder only, which thereby feeds every ordinal once. num_tokens: made
    here, and wasted if the entry is refused; not sent.
    """

    group_id: str
    weight_version: int
    payload: bytes
    is_evaluation: bool = False
    ordinal: int | None = None
    num_tokens: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """An entry that this consumer holds. Never changed; freezing it would triple the cost of making one.

    attempt: 1 when no worker tried before. created_at: Unix seconds on the server's clock, when it
    came to this stream. claimed_at: monotonic seconds on ours. Fields that cannot be read are
    empty: what to do with them is for whoever decodes the payload. has_partial: a generator that left may
    have saved what it had of it.
    """

    stream: Stream
    entry_id: bytes
    group_id: str
    attempt: int
    weight_version: int
    is_evaluation: bool
    created_at: float
    payload: bytes
    claimed_at: float
    has_partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """An entry seen from outside. consumer: who holds it, or None."""

    entry_id: str
    group_id: str
    attempt: int
    weight_version: int
    is_evaluation: bool
    created_at: float
    num_payload_bytes: int
    consumer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that no one can process.

    letter_id: names it to `requeue`. stream: where it died and goes back to. attempt: the one that
    failed. created_at, dead_at: Unix seconds on the server's clock.
    """

    letter_id: str
    group_id: str
    stream: Stream
    reason: str
    attempt: int
    weight_version: int
    is_evaluation: bool
    created_at: float
    dead_at: float
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Where the group that died last did so, and why."""

    stream: Stream
    reason: str


def text_of(fields: RawFields, name: bytes) -> str:
    """A field as text, whatever it holds."""
    return fields.get(name, b"").decode("utf-8", "replace")


def integer_of(fields: RawFields, name: bytes, default: int = 0) -> int:
    """A field as an integer, or the default where it is none."""
    value = fields.get(name, b"")
    return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else default


def seconds_of(fields: RawFields, name: bytes) -> float:
    """A field as Unix seconds, or 0 where it is none."""
    try:
        value = float(fields.get(name, b"0"))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def lease_of(stream: Stream, entry_id: bytes, fields: Sequence[bytes], attempt: int | None = None) -> Lease:
    """A lease on an entry just delivered.

    fields: names and values in turn. attempt: the one the fields say, unless it was reclaimed.
    """
    if fields[::2] != _NAMES:
        return _lease_of_other(stream, entry_id, dict(zip(fields[::2], fields[1::2], strict=True)), attempt)
    try:
        return Lease(
            stream=stream,
            entry_id=entry_id,
            group_id=fields[1].decode(),
            attempt=attempt or max(int(fields[3]), 1),
            weight_version=int(fields[5]),
            is_evaluation=False,
            created_at=float(fields[7]),
            payload=fields[11],
            claimed_at=time.monotonic(),
        )
    except ValueError:
        return _lease_of_other(stream, entry_id, dict(zip(fields[::2], fields[1::2], strict=True)), attempt)


def _lease_of_other(stream: Stream, entry_id: bytes, fields: RawFields, attempt: int | None) -> Lease:
    """An evaluation group, one that was begun, or an entry that is not as we write it."""
    return Lease(
        stream=stream,
        entry_id=entry_id,
        group_id=text_of(fields, b"group_id"),
        attempt=attempt or max(integer_of(fields, b"attempt", 1), 1),
        weight_version=integer_of(fields, b"weight_version"),
        is_evaluation=fields.get(b"evaluation") == b"1",
        created_at=seconds_of(fields, b"created_at"),
        payload=fields.get(b"payload", b""),
        claimed_at=time.monotonic(),
        has_partial=b"partial" in fields,
    )


class Renewing(Protocol):
    """What a keeper needs of the streams."""

    @property
    def lease_s(self) -> float:
        """Seconds without a sign of life after which a lease lapses."""

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renews; returns those that are lost."""


class LeaseKeeper:
    """Renews the leases it holds every third of their term, until they are dropped.

    `async with LeaseKeeper(streams) as keeper`. While Redis is away leases count as held: whether
    a result still counts is decided by the hand-over, not here.
    """

    def __init__(self, streams: Renewing) -> None:
        self._streams = streams
        self._held: dict[tuple[Stream, bytes], Lease] = {}
        self._lost: set[tuple[Stream, bytes]] = set()
        self._task: asyncio.Task[None] | None = None
        self.num_failures = 0

    async def __aenter__(self) -> LeaseKeeper:
        self._task = asyncio.create_task(self._run(), name="lease-keeper")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        # Gathering as a value keeps the cancellation of the keeper apart from one of ourselves.
        (result,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(result, Exception) and error is None:
            raise result

    @property
    def held(self) -> tuple[Lease, ...]:
        """Leases that are being renewed."""
        return tuple(self._held.values())

    def hold(self, leases: Iterable[Lease]) -> list[Lease]:
        """Renews these from now on; returns those that it was not holding already.

        A worker that stood still for longer than a lease can claim what it already works on: only
        what is returned is new work.
        """
        new = {(lease.stream, lease.entry_id): lease for lease in leases}
        new = {key: lease for key, lease in new.items() if key not in self._held}
        self._held.update(new)
        self._lost -= new.keys()
        return list(new.values())

    def drop(self, leases: Iterable[Lease]) -> None:
        """Forgets these: they were handed over, released or refused."""
        for lease in leases:
            self._held.pop((lease.stream, lease.entry_id), None)
            self._lost.discard((lease.stream, lease.entry_id))

    def is_lost(self, lease: Lease) -> bool:
        """Whether another worker may have it: further work on it is in vain."""
        return (lease.stream, lease.entry_id) in self._lost

    async def renew_now(self) -> list[Lease]:
        """Renews all at once; returns those newly lost."""
        lost = await self._streams.renew(self.held)
        # Some may have been dropped while the call was under way.
        lost = [lease for lease in lost if self._held.pop((lease.stream, lease.entry_id), None) is not None]
        self._lost.update((lease.stream, lease.entry_id) for lease in lost)
        return lost

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._streams.lease_s / 3)
            try:
                await self.renew_now()
            except RedisError:
                self.num_failures += 1
