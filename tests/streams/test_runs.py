"""Several runs and other applications share a server, and none notices the others."""

from __future__ import annotations

from redis.asyncio import Redis

from pipeline.config import QueueSettings
from pipeline.keys import Keys, Stream
from pipeline.streams import DropReason, Entry, Streams
from tests.streams.conftest import Worker, entries


async def whole_life(streams: Streams) -> None:
    await streams.open()
    await streams.feed(entries(4), limit=4)
    leases = await streams.claim(Stream.PROMPTS, 4, block_s=0)
    pairs = [(lease, Entry(group_id=lease.group_id, weight_version=0, payload=b"x")) for lease in leases[:2]]
    await streams.hand_over_many(pairs, Stream.SCORED)
    scored = await streams.claim(Stream.SCORED, 2, block_s=0)
    await streams.finish_training(scored, {lease.group_id: b"p" for lease in scored})
    await streams.drop(leases[2:3], DropReason.TOO_LONG)
    await streams.dead_letter(leases[3], "broken")
    await streams.feed(entries(1, is_evaluation=True), limit=0)


async def test_two_runs_share_a_server_and_touch_only_their_own_keys(redis: Redis, keys: Keys, run_name: str) -> None:
    foreign = f"app:{run_name}"
    await redis.set(foreign, "of another application")
    before = {key async for key in redis.scan_iter()}
    neighbour_keys = Keys(f"{run_name}-neighbour")
    ours, neighbour = (Streams(redis, of, QueueSettings(), consumer="w") for of in (keys, neighbour_keys))
    await whole_life(ours)
    assert await neighbour.claim(Stream.PROMPTS, 10, block_s=0) == []
    await neighbour.open()
    assert await neighbour.claim(Stream.PROMPTS, 10, block_s=0) == []
    after = {key async for key in redis.scan_iter()}
    assert all(
        key.startswith((f"{{{run_name}}}:".encode(), f"{{{run_name}-neighbour}}:".encode())) for key in after - before
    )
    await whole_life(neighbour)
    await neighbour.clear()
    assert (await ours.ledger()).fed == 4
    assert (await neighbour.ledger()).fed == 0
    assert await redis.get(foreign) == b"of another application"
    for key in (foreign, *[name async for name in redis.scan_iter(match=neighbour_keys.pattern.encode())]):
        await redis.delete(key)


async def test_clearing_a_run_leaves_nothing_to_train(worker: Worker) -> None:
    streams = worker()
    await whole_life(streams)
    await streams.clear()
    ledger = await streams.ledger()
    assert (ledger.fed, ledger.live, ledger.trained, ledger.eval_live, ledger.next_ordinal) == (0, 0, 0, 0, 0)
    assert await streams.claim(Stream.PROMPTS, 1, block_s=0) == []
    assert await streams.feed(entries(1), limit=1) == 1


async def test_streams_that_vanish_under_a_worker_are_made_again(worker: Worker, redis: Redis, keys: Keys) -> None:
    streams = worker()
    await streams.feed(entries(1), limit=1)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    await redis.delete(*keys.streams, keys.ledger)
    assert await streams.renew([lease]) == [lease]
    assert await streams.claim(Stream.PROMPTS, 1, block_s=0) == []
    assert streams.num_reopened == 1
    assert await streams.feed(entries(1, first=1), limit=1) == 1
    assert len(await streams.claim(Stream.PROMPTS, 1, block_s=0)) == 1
