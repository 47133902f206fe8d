"""What can be seen of a run's streams without changing them.

In: the run's keys. Out: the ledger, depths, waiting entries, dead letters, uncommitted groups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

from redis.asyncio import Redis

from pipeline.keys import CONSUMER_GROUP, Keys, Stream
from pipeline.queues.connection import Scripts, until_accepted
from pipeline.queues.foreign import reading
from pipeline.queues.leases import DeadLetter, Death, Queued, RawFields, integer_of, seconds_of, text_of
from pipeline.queues.ledger import Depth, Ledger, read_depths, read_ledger

_BY_NAME = {stream.value: stream for stream in Stream}
_Result = TypeVar("_Result")


class Accounts:
    """Views of the streams of one run."""

    def __init__(self, redis: Redis, keys: Keys, *, consumer: str) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys, consumer=consumer)
        self.consumer = consumer

    async def ledger(self) -> Ledger:
        """All accounts at one instant."""
        reply = await self._scripts.call("ledger")
        with reading(self._keys, self._keys.ledger):
            return read_ledger(reply)

    async def depths(self) -> dict[Stream, Depth]:
        """How full the streams are at one instant."""
        return read_depths(await self._scripts.call("depths"))

    async def peek(self, stream: Stream, count: int) -> list[Queued]:
        """The oldest entries of a stream, and who holds them."""
        key = self._keys.stream(stream)
        entries = await self._range(key, count)
        if not entries:
            return []
        pending = await self._accepted(
            lambda: self._redis.xpending_range(key, CONSUMER_GROUP, min=entries[0][0], max=entries[-1][0], count=count)
        )
        holders = {row["message_id"]: row["consumer"].decode("utf-8", "replace") for row in cast(Any, pending)}
        return [_queued(entry_id, fields, holders.get(entry_id)) for entry_id, fields in entries]

    async def dead_letters(self, count: int | None = None) -> list[DeadLetter]:
        """Groups that no one can process, oldest first."""
        entries = await self._range(self._keys.dead_letters, count)
        return [_dead_letter(letter_id, fields) for letter_id, fields in entries]

    async def last_death(self) -> Death | None:
        """The newest dead letter; None where there is none."""
        said = [text.decode("utf-8", "replace") for text in await self._scripts.call("last_letter")]
        return Death(stream=_BY_NAME.get(said[0], Stream.PROMPTS), reason=said[1]) if said else None

    async def uncommitted(self) -> dict[str, bytes]:
        """Group id -> prompt payload of all that is trained but in no checkpoint, by group id."""
        reply = await self._accepted(
            lambda: cast(Awaitable[Mapping[bytes, bytes]], self._redis.hgetall(self._keys.uncommitted))
        )
        return {group_id.decode(): payload for group_id, payload in sorted(reply.items())}

    async def partial(self, group_id: str) -> bytes | None:
        """What a generator that left has generated of a group; None where there is nothing."""
        return await self._accepted(
            lambda: cast(Awaitable[bytes | None], self._redis.hget(self._keys.partials, group_id))
        )

    async def _range(self, key: str, count: int | None) -> list[tuple[bytes, RawFields]]:
        return cast(list[tuple[bytes, RawFields]], await self._accepted(lambda: self._redis.xrange(key, count=count)))

    async def _accepted(self, call: Callable[[], Awaitable[_Result]], *, waits: bool = True) -> _Result:
        """A plain command, as patient as the scripts are."""
        return await until_accepted(self._redis, self._keys, call, waits=waits)


def _queued(entry_id: bytes, fields: RawFields, consumer: str | None) -> Queued:
    return Queued(
        entry_id=entry_id.decode(),
        group_id=text_of(fields, b"group_id"),
        attempt=integer_of(fields, b"attempt", 1),
        weight_version=integer_of(fields, b"weight_version"),
        is_evaluation=fields.get(b"evaluation") == b"1",
        created_at=seconds_of(fields, b"created_at"),
        num_payload_bytes=len(fields.get(b"payload", b"")),
        consumer=consumer,
    )


def _dead_letter(letter_id: bytes, fields: RawFields) -> DeadLetter:
    return DeadLetter(
        letter_id=letter_id.decode(),
        group_id=text_of(fields, b"group_id"),
        stream=_BY_NAME.get(text_of(fields, b"stream"), Stream.PROMPTS),
        reason=text_of(fields, b"reason"),
        attempt=integer_of(fields, b"attempt", 1),
        weight_version=integer_of(fields, b"weight_version"),
        is_evaluation=fields.get(b"evaluation") == b"1",
        created_at=seconds_of(fields, b"created_at"),
        dead_at=seconds_of(fields, b"dead_at"),
        payload=fields.get(b"payload", b""),
    )
