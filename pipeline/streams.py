"""Groups on their way: fed, claimed, handed over, dropped, dead, trained.

In: entries and leases. Out: leases and what became of each call. A group is in one place at every
instant: each movement is one Lua call that goes on only if this consumer still holds the entry,
and that keeps the ledger. Streams are never trimmed, and no payload is ever looked into.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as TooLate

from pipeline.config import QueueSettings
from pipeline.keys import CONSUMER_GROUP, Keys, Stream
from pipeline.messages import SCHEMA_VERSION
from pipeline.queues.accounts import Accounts
from pipeline.queues.batches import BATCH_GROUPS, batches, by_stream, entry_ids, ids_and_versions, num_bytes, unheld
from pipeline.queues.connection import MAX_BLOCK_S, connect, is_away, passes
from pipeline.queues.leases import DeadLetter, Entry, Lease, LeaseKeeper, Moved, Queued, lease_of
from pipeline.queues.ledger import Depth, DropReason, Ledger

__all__ = [
    "DeadLetter",
    "Depth",
    "DropReason",
    "Entry",
    "Lease",
    "LeaseKeeper",
    "Ledger",
    "Moved",
    "Queued",
    "Streams",
    "connect",
]

_INDEX = {stream: index for index, stream in enumerate(Stream, start=1)}
_OUTCOMES = (Moved.REFUSED, Moved.MOVED, Moved.FULL)
_MAX_REASON = 1000
_SCHEMA = str(SCHEMA_VERSION)
_FORGET_CONSUMER_MS = 3600 * 1000


class Streams(Accounts):
    """The streams of one run, as one consumer sees them.

    consumer: unique among living workers; a worker that comes back under its name finds its leases.
    """

    def __init__(self, redis: Redis, keys: Keys, settings: QueueSettings, *, consumer: str) -> None:
        super().__init__(redis, keys, consumer=consumer)
        self._settings = settings
        self._cursors = dict.fromkeys(Stream, b"0-0")
        self._next_reclaim_at = dict.fromkeys(Stream, 0.0)
        self.num_reopened = 0

    @property
    def lease_s(self) -> float:
        """Seconds without a sign of life after which a lease lapses."""
        return self._settings.lease_s

    @property
    def fence(self) -> str:
        """Id of the trainer whose streams these are, which is refused once another took over; empty for all others."""
        return self._scripts.fence

    @fence.setter
    def fence(self, trainer: str) -> None:
        self._scripts.fence = trainer

    async def open(self) -> None:
        """Makes the consumer groups where they are missing. Harmless when repeated."""
        await self._scripts.call("open", _FORGET_CONSUMER_MS)

    async def clear(self) -> None:
        """Removes all groups, dead letters and accounts of this run, and opens it anew."""
        await self._redis.unlink(*self._scripts.keys)
        await self.open()

    # Into the streams

    async def feed(self, entries: Sequence[Entry], *, limit: int) -> int:
        """Puts groups on `prompts` while fewer than `limit` training groups are live.

        Returns how many from the front were accepted. Evaluation groups are bound by
        queues.max_length only. What was fed before counts as accepted and is left alone: a
        training group whose ordinal is below the ledger's next_ordinal, an evaluation group that
        is still in the streams.
        """
        accepted = 0
        for batch in batches(entries, num_bytes):
            done: int = await self._scripts.call(
                "feed",
                limit,
                self._settings.max_length,
                _SCHEMA,
                *ids_and_versions(batch),
                [entry.is_evaluation for entry in batch],
                [-1 if entry.ordinal is None else entry.ordinal for entry in batch],
                payloads=[entry.payload for entry in batch],
            )
            accepted += done
            if done < len(batch):
                break
        return accepted

    async def refeed_uncommitted(self, entries: Sequence[Entry], *, limit: int) -> int:
        """Moves uncommitted groups back to `prompts`, to be generated afresh.

        For a trainer that resumes: their effect was lost with the weights. entries: the groups of
        `uncommitted`, stamped for the restored version. Returns how many from the front were
        accepted; feed nothing new before it is all of them.
        """
        accepted = 0
        for batch in batches(entries, num_bytes):
            done: int = await self._scripts.call(
                "refeed",
                limit,
                self._settings.max_length,
                _SCHEMA,
                *ids_and_versions(batch),
                payloads=[entry.payload for entry in batch],
            )
            accepted += done
            if done < len(batch):
                break
        return accepted

    async def bury_uncommitted(self, reasons: Mapping[str, str]) -> int:
        """Sets uncommitted groups aside that cannot be fed again. reasons: group id -> why. Returns how many."""
        buried = 0
        for batch in batches([*reasons]):
            why = [reasons[group_id][:_MAX_REASON] for group_id in batch]
            buried += await self._scripts.call("bury_uncommitted", _SCHEMA, batch, why)
        return buried

    async def requeue(self, ids: Sequence[str] | None = None, payloads: Mapping[str, bytes] | None = None) -> int:
        """Moves dead letters back to the stream they died in, with a full set of attempts.

        ids: of letters, None takes all. payloads: letter id -> mended payload. Returns how many
        moved; a letter that is gone, or whose stream is full, is not among them.
        """
        if ids is None:
            ids = [letter.letter_id for letter in await self.dead_letters()]
        mended = payloads or {}
        moved = 0
        for batch in batches(ids, lambda letter_id: len(mended.get(letter_id, b""))):
            moved += await self._scripts.call(
                "requeue",
                self._settings.max_length,
                batch,
                [letter_id in mended for letter_id in batch],
                payloads=[mended.get(letter_id, b"") for letter_id in batch],
            )
        return moved

    # Claiming

    async def claim(self, stream: Stream, count: int, *, block_s: float) -> list[Lease]:
        """Up to `count` groups: those whose lease lapsed first, then new ones.

        Waits up to `block_s` for the first one. Lapsed leases are looked for every third of a
        lease, again where the last look found all it wanted, and whenever there is nothing new; what
        was tried max_attempts times is dead-lettered.
        A call that is cancelled, or whose reply is lost, may leave groups with this consumer: they
        come back when their lease lapses.
        """
        deadline = time.monotonic() + block_s
        leases: list[Lease] = []
        if time.monotonic() >= self._next_reclaim_at[stream]:
            leases = await self._reclaim(stream, count)
        # What was taken over is returned at once. It may be this consumer's own, from before a stall:
        # nothing may finish it between the server's answer and the caller's look at what it holds.
        while not leases:
            wait_s = min(max(deadline - time.monotonic(), 0.0), self.lease_s / 3, MAX_BLOCK_S)
            leases = await self._read(stream, count, wait_s)
            if leases:
                return leases
            leases = await self._reclaim(stream, count)
            if time.monotonic() >= deadline:
                break
        return leases

    async def _read(self, stream: Stream, count: int, wait_s: float) -> list[Lease]:
        try:
            reply = await self._accepted(
                lambda: self._redis.xreadgroup(
                    CONSUMER_GROUP,
                    self.consumer,
                    {self._keys.stream(stream): ">"},
                    count=count,
                    block=max(1, int(wait_s * 1000)) if wait_s > 0 else None,
                ),
                waits=False,
            )
        except (ResponseError, Unreachable, TooLate) as error:
            await self._reopen_after(error)
            return []
        entries = cast(Any, reply)[0][1] if reply else []
        return [lease_of(stream, entry_id, fields) for entry_id, fields in entries]

    async def _reclaim(self, stream: Stream, count: int) -> list[Lease]:
        self._next_reclaim_at[stream] = time.monotonic() + self.lease_s / 3
        lease_ms = max(1, int(self.lease_s * 1000))
        cursor, limit = self._cursors[stream], self._settings.max_attempts
        try:
            reply = await self._scripts.call("reclaim", _INDEX[stream], lease_ms, count, cursor, limit)
        except ResponseError as error:
            await self._reopen_after(error)
            return []
        self._cursors[stream], taken = reply
        if len(taken) == count:
            self._next_reclaim_at[stream] = 0.0  # more may have lapsed, and they come before what is new
        return [lease_of(stream, entry_id, fields, attempt) for entry_id, attempt, fields in taken]

    async def _reopen_after(self, error: RedisError) -> None:
        """A server that came back without its data has no consumer groups: makes them again."""
        if passes(error) or is_away(error):
            return  # the reclaim behind this read waits until the server is there and takes writes again
        if not any(word in str(error) for word in ("NOGROUP", "UNBLOCKED")):
            raise error
        self.num_reopened += 1
        await self.open()

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Restarts the term of these leases; returns those that are lost."""
        lost: list[Lease] = []
        for stream, batch in by_stream(leases):
            held = await self._scripts.call("renew", _INDEX[stream], entry_ids(batch))
            lost += unheld(batch, held)
        return lost

    # Onward

    async def hand_over(self, lease: Lease, entry: Entry, to: Stream) -> Moved:
        """Moves one group to the next stream, if its lease still holds."""
        return (await self.hand_over_many([(lease, entry)], to))[0]

    async def hand_over_many(self, pairs: Sequence[tuple[Lease, Entry]], to: Stream) -> list[Moved]:
        """Moves groups to the next stream, each if its lease still holds and there is room."""
        outcomes: list[Moved] = []
        for stream, group in itertools.groupby(pairs, lambda pair: pair[0].stream):
            for batch in batches(list(group), lambda pair: len(pair[1].payload)):
                leases, entries = [lease for lease, _ in batch], [entry for _, entry in batch]
                assert [lease.group_id for lease in leases] == [entry.group_id for entry in entries]
                codes = await self._scripts.call(
                    "hand_over",
                    _INDEX[stream],
                    _INDEX[to],
                    self._settings.max_length,
                    _SCHEMA,
                    entry_ids(leases),
                    *ids_and_versions(entries),
                    [lease.is_evaluation for lease in leases],
                    payloads=[entry.payload for entry in entries],
                )
                outcomes += [_OUTCOMES[code] for code in codes]
        return outcomes

    async def release(
        self, leases: Sequence[Lease], *, has_failed: bool = False, partials: Mapping[str, bytes] | None = None
    ) -> int:
        """Gives groups back: others can claim them at once. Returns how many were still held.

        has_failed: the attempt counts; without it, as in a drain, it does not. partials: group id -> what was
        generated of it, saved for whoever claims it next; what was saved before stays unless it has failed.
        """
        released, saved = 0, partials or {}
        for stream, batch in by_stream(leases):
            released += await self._scripts.call(
                "release",
                _INDEX[stream],
                entry_ids(batch),
                [lease.attempt + has_failed for lease in batch],
                has_failed,
                [lease.group_id for lease in batch],
                [lease.group_id in saved for lease in batch],
                payloads=[saved.get(lease.group_id, b"") for lease in batch],
            )
        return released

    async def save_partials(self, leases: Sequence[Lease], partials: Mapping[str, bytes]) -> int:
        """Keeps what was generated so far of these groups, for whoever takes them over; work on them goes on.

        partials: group id -> what replaces what was kept of it before. Returns how many were still held.
        """
        saved = 0
        for batch in batches(leases, lambda lease: len(partials[lease.group_id])):
            held = await self._scripts.call(
                "save_partials",
                _INDEX[Stream.PROMPTS],
                entry_ids(batch),
                [lease.group_id for lease in batch],
                payloads=[partials[lease.group_id] for lease in batch],
            )
            saved += sum(map(bool, held))
        return saved

    async def release_all(self) -> int:
        """Gives back all that this consumer holds, also what it never saw; then it is gone.

        Returns how many. For the end of a worker: nothing else may use this object meanwhile.
        """
        released = 0
        for stream in Stream:
            left = 1
            while left:
                done, left = await self._scripts.call("release_all", _INDEX[stream], BATCH_GROUPS)
                released += done
        await self._accepted(lambda: self._redis.hdel(self._keys.replies, self.consumer))
        return released

    # Out of the streams

    async def dead_letter(self, lease: Lease, reason: str) -> bool:
        """Sets a group aside that cannot be processed. False when the lease was lost."""
        held: bool = await self._scripts.call(
            "dead_letter", _INDEX[lease.stream], lease.entry_id, lease.attempt, reason[:_MAX_REASON]
        )
        return held

    async def drop(self, leases: Sequence[Lease], reason: DropReason, *, refeed: Sequence[Entry] = ()) -> int:
        """Takes groups out unused and frees their places; returns how many were still held.

        refeed: for each lease the new group that takes its place, or none at all.
        """
        if refeed and len(refeed) != len(leases):
            raise ValueError(f"{len(refeed)} groups to feed again for {len(leases)} dropped ones")
        substitutes = dict(zip((lease.entry_id for lease in leases), refeed, strict=False))
        dropped = 0
        for stream, batch in by_stream(leases):
            instead = [substitutes[lease.entry_id] for lease in batch] if refeed else []
            dropped += await self._scripts.call(
                "drop",
                _INDEX[stream],
                reason.value,
                _SCHEMA,
                entry_ids(batch),
                [lease.is_evaluation and lease.group_id for lease in batch],
                *ids_and_versions(instead),
                payloads=[entry.payload for entry in instead],
            )
        return dropped

    async def finish_training(self, leases: Sequence[Lease], prompts: Mapping[str, bytes]) -> list[Lease]:
        """The groups of one optimiser step, in one call: trained, and uncommitted until `commit`.

        leases: on `scored`. prompts: group id -> payload of its prompt. Returns those whose lease
        was lost.
        """
        if not leases:
            return []
        assert all(lease.stream is Stream.SCORED and not lease.is_evaluation for lease in leases)
        held = await self._scripts.call(
            "finish_training",
            _INDEX[Stream.SCORED],
            entry_ids(leases),
            [lease.group_id for lease in leases],
            payloads=[prompts[lease.group_id] for lease in leases],
        )
        return unheld(leases, held)

    async def finish_evaluation(self, leases: Sequence[Lease]) -> list[Lease]:
        """Evaluation groups that were reported. Returns those whose lease was lost."""
        lost: list[Lease] = []
        for stream, batch in by_stream(leases):
            group_ids = [lease.group_id for lease in batch]
            held = await self._scripts.call("finish_evaluation", _INDEX[stream], entry_ids(batch), group_ids)
            lost += unheld(batch, held)
        return lost

    # Commitment

    async def commit(self, group_ids: Sequence[str]) -> int:
        """These groups' effect is in a checkpoint on disk. Returns how many were uncommitted."""
        committed = 0
        for batch in batches(group_ids):
            committed += await self._scripts.call("commit", batch)
        return committed
