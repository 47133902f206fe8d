"""Whatever workers do, in whatever order: the ledger balances and no group is in two places."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from pipeline.config import QueueSettings, RedisSettings
from pipeline.keys import CONSUMER_GROUP, Keys, Stream
from pipeline.streams import DropReason, Entry, Lease, Moved, Streams, connect

LIMIT, MAX_LENGTH, WORKERS = 12, 10, 2
ACTIONS = (
    "feed",
    "feed_evaluation",
    "claim",
    "hand_over",
    "hand_over",
    "lapse",
    "release",
    "fail",
    "dead_letter",
    "drop",
    "replace",
    "finish",
    "finish",
    "commit",
    "refeed",
    "requeue",
    "leave",
)
Step = tuple[str, int, Stream, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, WORKERS - 1), st.sampled_from(list(Stream)), st.integers(1, 5)),
    min_size=30,
    max_size=80,
)


class World:
    """A run with three workers. Leases are kept even when they are lost: workers do not know."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.queues = QueueSettings(max_attempts=2, max_length=MAX_LENGTH)
        self.redis, self.keys = redis, keys
        self.workers = [Streams(redis, keys, self.queues, consumer=f"w{index}") for index in range(WORKERS)]
        self.held: list[list[Lease]] = [[] for _ in range(WORKERS)]
        self.fed: Counter[str] = Counter()
        self.gone: Counter[str] = Counter()
        self.ordinal = 0

    def take(self, worker: int, stream: Stream, count: int) -> list[Lease]:
        """Leases of a worker on a stream, some of which may be lost."""
        taken = [lease for lease in self.held[worker] if lease.stream is stream][:count]
        self.held[worker] = [lease for lease in self.held[worker] if lease not in taken]
        return taken

    async def feed(self, streams: Streams, count: int) -> None:
        batch = [
            Entry(group_id=f"{ordinal:08d}", weight_version=0, payload=b"p", ordinal=ordinal)
            for ordinal in range(self.ordinal, self.ordinal + count)
        ]
        accepted = await streams.feed(batch, limit=LIMIT)
        self.ordinal += accepted
        self.fed.update(entry.group_id for entry in batch[:accepted])

    async def feed_evaluation(self, streams: Streams, count: int) -> None:
        before = await self.places()
        batch = [Entry(group_id=f"e{n}", weight_version=0, payload=b"e", is_evaluation=True) for n in range(count)]
        accepted = await streams.feed(batch, limit=LIMIT)
        self.fed.update(entry.group_id for entry in batch[:accepted] if before["streams", entry.group_id] == 0)

    async def lapse(self, leases: list[Lease]) -> None:
        for lease in leases:
            where = (self.keys.stream(lease.stream), CONSUMER_GROUP)
            rows = await self.redis.xpending_range(*where, lease.entry_id, lease.entry_id, 1)
            for row in rows:
                await self.redis.xclaim(*where, row["consumer"], 0, [lease.entry_id], idle=10**8, justid=True)

    async def claim(self, streams: Streams, stream: Stream, count: int) -> list[Lease]:
        """Claims under the worker's name, looking for lapsed leases every time."""
        fresh = Streams(self.redis, self.keys, self.queues, consumer=streams.consumer)
        return await fresh.claim(stream, count, block_s=0)

    async def step(self, action: str, worker: int, stream: Stream, count: int) -> None:
        streams = self.workers[worker]
        if action == "claim":
            self.held[worker] += await self.claim(streams, stream, count)
            return
        if action in {"feed", "feed_evaluation"}:
            await getattr(self, action)(streams, count)
            return
        if action == "lapse":
            await self.lapse([lease for lease in self.held[worker] if lease.stream is stream][:count])
            return
        if action in {"commit", "refeed", "requeue", "leave"}:
            await self.administer(action, worker, count)
            return
        leases = self.take(worker, stream, count) or await self.claim(streams, stream, count)
        await self.move(action, streams, leases, stream)

    async def administer(self, action: str, worker: int, count: int) -> None:
        streams = self.workers[worker]
        if action == "leave":
            await streams.release_all()
        elif action == "requeue":
            await streams.requeue([letter.letter_id for letter in await streams.dead_letters(count)])
        else:
            ids = list(await streams.uncommitted())[:count]
            if action == "commit":
                self.gone.update(ids)
                assert await streams.commit(ids) == len(ids)
            else:
                again = [Entry(group_id=group_id, weight_version=1, payload=b"r") for group_id in ids]
                await streams.refeed_uncommitted(again, limit=LIMIT)

    async def move(self, action: str, streams: Streams, leases: list[Lease], stream: Stream) -> None:
        if action == "hand_over":
            target = Stream.SCORED if stream is not Stream.SCORED else Stream.ROLLOUTS
            pairs = [(lease, Entry(group_id=lease.group_id, weight_version=0, payload=b"x")) for lease in leases]
            outcomes = await streams.hand_over_many(pairs, target)
            kept = [lease for lease, outcome in zip(leases, outcomes, strict=True) if outcome is Moved.FULL]
            self.held[self.workers.index(streams)] += kept
        elif action in {"release", "fail"}:
            await streams.release(leases, has_failed=action == "fail")
        elif action == "dead_letter":
            for lease in leases:
                await streams.dead_letter(lease, "test")
        elif action in {"drop", "replace", "finish"}:
            await self.end(action, streams, leases, stream)

    async def end(self, action: str, streams: Streams, leases: list[Lease], stream: Stream) -> None:
        for lease in leases:
            if action == "finish" and lease.is_evaluation:
                self.gone[lease.group_id] += not await streams.finish_evaluation([lease])
            elif action == "finish" and stream is Stream.SCORED:
                await streams.finish_training([lease], {lease.group_id: b"p"})
            elif action == "replace" and not lease.is_evaluation:
                again = Entry(group_id=f"{lease.group_id}+", weight_version=0, payload=b"x")
                dropped = await streams.drop([lease], DropReason.STALE, refeed=[again])
                self.gone[lease.group_id] += dropped
                self.fed[again.group_id] += dropped
            else:
                self.gone[lease.group_id] += await streams.drop([lease], DropReason.UNSCORED)

    async def places(self) -> Counter[tuple[str, str]]:
        """Where each id is now: in the streams, dead or uncommitted."""
        found: Counter[tuple[str, str]] = Counter()
        for stream in Stream:
            found.update(("streams", queued.group_id) for queued in await self.workers[0].peek(stream, 1000))
        found.update(("dead", letter.group_id) for letter in await self.workers[0].dead_letters())
        found.update(("uncommitted", group_id) for group_id in await self.workers[0].uncommitted())
        return found

    async def check(self) -> None:
        ledger = await self.workers[0].ledger()
        assert ledger.balances, ledger
        assert ledger.live <= LIMIT + ledger.dead + MAX_LENGTH
        now = await self.places()
        ids = Counter({group_id: 0 for group_id in self.fed})
        for (_, group_id), count in now.items():
            ids[group_id] += count
        assert {group_id: ids[group_id] + self.gone[group_id] for group_id in self.fed} == dict(self.fed)
        assert ids.keys() == self.fed.keys()
        assert ledger.fed + ledger.eval_fed == self.fed.total()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(RedisSettings(), redis_url)
    yield client
    await client.aclose()


# Without shrinking: a failure is reported in seconds, and its steps are readable as they are.
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
async def test_no_order_of_actions_loses_or_doubles_a_group(client: Redis, steps: list[Step]) -> None:
    world = World(client, Keys(f"test-{uuid.uuid4().hex[:12]}"))
    await world.workers[0].open()
    for step in [("feed", 0, Stream.PROMPTS, 5), ("feed_evaluation", 0, Stream.PROMPTS, 2), *steps]:
        await world.step(*step)
        assert (await world.workers[0].ledger()).balances, step
    await world.check()
    await client.delete(*world.workers[0]._scripts.keys)
