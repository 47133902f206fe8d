"""What a hop between two stages costs, against the bare server and against the usual pattern.

A hop is: bounded push, read, acknowledge-and-delete, with leases, ledger and all guarantees on, in
batches of 2 KiB groups. Compared with `redis-benchmark XADD -P 16`, a C client that only appends
the same entry, and with one XADD for each sample and XREAD COUNT 1. All run against one server, in
turn, several times; reported are medians over the rounds.

What bounds the first ratio is measured beside it: the processor time that the server spends on a
hop, that it spends on the four bare commands of one without any guarantee, and that our client
spends. With two cores no hop can be quicker than the slower of its two sides.

    python -m benchmarks.queue --json
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from benchmarks.report import report
from benchmarks.rollouts import rollout_payload, scored_payload
from pipeline.config import QueueSettings, RedisSettings
from pipeline.embedded import EmbeddedServer
from pipeline.keys import Keys, Stream
from pipeline.streams import DropReason, Entry, Lease, Moved, Streams, connect

PAYLOAD_BYTES = 2048
_FIELDS = ["group_id", "00000000", "attempt", "1", "weight_version", "0", "created_at", "1700000000.0", "schema", "1"]
_WARM_UP = 1024
_BLOCK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """num_groups: in one measurement. batch: groups in one call. pairs: producers and consumers at once."""

    num_groups: int
    batch: int
    pairs: int


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is measured in turn")
    parser.add_argument("--groups", type=int, default=32768, help="groups in one measurement")
    parser.add_argument("--batch", type=int, default=128, help="groups in one call")
    parser.add_argument("--pairs", type=int, default=4, help="producers, and consumers, at once")
    arguments = parser.parse_args()
    program = shutil.which("redis-benchmark")
    if program is None:
        sys.exit("redis-benchmark is not on PATH: install it, for example with `apt-get install redis-tools`")
    load = Load(num_groups=arguments.groups, batch=arguments.batch, pairs=arguments.pairs)
    with EmbeddedServer.start() as server:
        results = asyncio.run(compare(program, server, load, arguments.rounds))
    report("queue", results, as_json=arguments.json)


async def compare(program: str, server: EmbeddedServer, load: Load, rounds: int) -> dict[str, float]:
    """Groups a second of each, and the ratios; all are medians over the rounds."""
    measurements: dict[str, Callable[[int], Awaitable[float]]] = {
        "redis_benchmark": lambda num: redis_benchmark(program, server, 2 * num, _FIELDS),
        "redis_benchmark_payload_only": lambda num: redis_benchmark(program, server, 2 * num, []),
        "hop": lambda num: hop(server.url, load, num),
        "xadd_xread1": lambda num: xadd_xread1(server.url, num // 8),
        "hand_over": lambda num: hand_over(server.url, load, num),
        "hand_over_coded": lambda num: hand_over(server.url, load, num // 8, is_coded=True),
    }
    for measure in measurements.values():
        await measure(_WARM_UP)
    rows = [{name: await measure(load.num_groups) for name, measure in measurements.items()} for _ in range(rounds)]
    ours, bare = await processor_time(server.url, load, hop), await processor_time(server.url, load, bare_hop)

    def ratio(ours: str, theirs: str) -> float:
        return round(statistics.median(row[ours] / row[theirs] for row in rows), 3)

    def limit(busy_us: float) -> float:
        return round(1e6 / busy_us / statistics.median(row["redis_benchmark"] for row in rows), 3)

    return {
        "hop_vs_redis_benchmark": ratio("hop", "redis_benchmark"),
        "hop_vs_redis_benchmark_payload_only": ratio("hop", "redis_benchmark_payload_only"),
        "hop_vs_xadd_xread1": ratio("hop", "xadd_xread1"),
        "hand_over_vs_redis_benchmark": ratio("hand_over", "redis_benchmark"),
        "hop_limit_by_client": limit(ours.client_us),
        "hop_limit_by_server": limit(ours.server_us),
        "hop_limit_by_server_bare_commands": limit(bare.server_us),
        "hop_client_us": round(ours.client_us, 1),
        "hop_server_us": round(ours.server_us, 1),
        "bare_commands_server_us": round(bare.server_us, 1),
        **{f"{name}_per_s": round(statistics.median(row[name] for row in rows)) for name in measurements},
        "payload_bytes": PAYLOAD_BYTES,
        "coded_payload_bytes": len(rollout_payload(0)),
        "batch": load.batch,
    }


async def redis_benchmark(program: str, server: EmbeddedServer, num: int, fields: Sequence[str]) -> float:
    """Appends a second of the C client: fifty connections with sixteen entries in flight on each."""
    where = ["-s", str(server.socket_path), "-P", "16", "-n", str(num), "--csv"]
    command = ["XADD", "bare", "*", *fields, "payload", "x" * PAYLOAD_BYTES]
    done = await asyncio.to_thread(
        subprocess.run, [program, *where, *command], check=True, stdout=subprocess.PIPE, text=True
    )
    async with _client(server.url) as client:
        await client.delete("bare")
    # The last line is "command","rate",...; the payload is the end of the command.
    return float(done.stdout.splitlines()[-1].rpartition(PAYLOAD_BYTES * "x")[2].split(",")[1].strip('"'))


async def hop(url: str, load: Load, num: int) -> float:
    """Groups a second that are fed, claimed and taken out, producers and consumers at once."""
    batches = iter(_batches(_entries(num), load.batch))
    room = asyncio.Semaphore(4 * load.pairs)
    num_out = 0

    async def produce(streams: Streams) -> None:
        for batch in batches:
            await room.acquire()
            assert await streams.feed(batch, limit=num) == len(batch)

    async def consume(streams: Streams) -> None:
        nonlocal num_out
        while num_out < num:
            leases = await streams.claim(Stream.PROMPTS, load.batch, block_s=_BLOCK_S)
            num_dropped = await streams.drop(leases, DropReason.STALE)
            for _ in range((num_out + num_dropped) // load.batch - num_out // load.batch):
                room.release()
            num_out += num_dropped

    async with _workers(url, 2 * load.pairs) as workers:
        started = time.perf_counter()
        await asyncio.gather(*map(produce, workers[: load.pairs]), *map(consume, workers[load.pairs :]))
        seconds = time.perf_counter() - started
        ledger = await workers[0].ledger()
        assert ledger.balances, ledger
        assert ledger.num_dropped == num, ledger
    return num / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorTime:
    """Microseconds of one core for one group, on each side."""

    client_us: float
    server_us: float


async def processor_time(url: str, load: Load, measure: Callable[[str, Load, int], Awaitable[float]]) -> ProcessorTime:
    """What this process and the server spend while `measure` runs."""

    async def server_s(client: Redis) -> float:
        info = await client.info("cpu")
        return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])

    async with _client(url) as client:
        server, mine = await server_s(client), time.process_time()
        await measure(url, load, load.num_groups)
        mine, server = time.process_time() - mine, await server_s(client) - server
    return ProcessorTime(client_us=mine / load.num_groups * 1e6, server_us=server / load.num_groups * 1e6)


async def bare_hop(url: str, load: Load, num: int) -> float:
    """Groups a second through the commands of a hop and nothing else, in pipelines of one batch."""
    payload = b"x" * PAYLOAD_BYTES
    async with _client(url) as client:
        await client.xgroup_create("bare", "group", mkstream=True)
        started = time.perf_counter()
        for _ in range(num // load.batch):
            pipeline = client.pipeline(transaction=False)
            for _ in range(load.batch):
                pipeline.execute_command("XADD", "bare", "*", *_FIELDS, "payload", payload)
            await pipeline.execute()
            read: Any = await client.xreadgroup("group", "consumer", {"bare": ">"}, count=load.batch)
            ids = [entry_id for entry_id, _ in read[0][1]]
            assert await client.xack("bare", "group", *ids) == await client.xdel("bare", *ids) == load.batch
        seconds = time.perf_counter() - started
        await client.delete("bare")
    return num / seconds


async def hand_over(url: str, load: Load, num: int, *, is_coded: bool = False) -> float:
    """Groups a second that are claimed and handed over; is_coded: decoded, scored and encoded between."""
    entries = _entries(num, rollout_payload if is_coded else None)
    num_out = 0

    async def work(streams: Streams) -> None:
        nonlocal num_out
        while num_out < num:
            leases = await streams.claim(Stream.PROMPTS, load.batch, block_s=_BLOCK_S)
            moved = await streams.hand_over_many([(lease, _next(lease, is_coded)) for lease in leases], Stream.SCORED)
            num_out += moved.count(Moved.MOVED)

    async with _workers(url, load.pairs) as workers:
        assert await workers[0].feed(entries, limit=num) == num
        started = time.perf_counter()
        await asyncio.gather(*map(work, workers))
        seconds = time.perf_counter() - started
        ledger = await workers[0].ledger()
        assert ledger.balances, ledger
        assert ledger.live == num, ledger
    return num / seconds


async def xadd_xread1(url: str, num: int) -> float:
    """Samples a second of the usual pattern: no group, no acknowledgement, no bound."""
    payload = b"x" * PAYLOAD_BYTES

    async def produce(client: Redis) -> None:
        for _ in range(num):
            await client.xadd("plain", {"payload": payload})

    async def consume(client: Redis) -> None:
        last: bytes | str = b"0"
        for _ in range(num):
            reply = await client.xread({"plain": last}, count=1, block=5000)
            assert isinstance(reply, list)
            last = reply[0][1][0][0]

    async with _client(url) as producer, _client(url) as consumer:
        started = time.perf_counter()
        await asyncio.gather(produce(producer), consume(consumer))
        seconds = time.perf_counter() - started
        await producer.delete("plain")
    return num / seconds


def _entries(num: int, payload_of: Callable[[int], bytes] | None = None) -> list[Entry]:
    plain = b"x" * PAYLOAD_BYTES
    return [
        Entry(group_id=f"{number:08d}", weight_version=0, payload=payload_of(number) if payload_of else plain)
        for number in range(num)
    ]


def _next(lease: Lease, is_coded: bool) -> Entry:
    payload = scored_payload(lease.payload) if is_coded else lease.payload
    return Entry(group_id=lease.group_id, weight_version=lease.weight_version, payload=payload)


def _batches(entries: Sequence[Entry], size: int) -> list[Sequence[Entry]]:
    return [entries[start : start + size] for start in range(0, len(entries), size)]


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[Redis]:
    client = connect(RedisSettings(), url)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def _workers(url: str, num: int) -> AsyncIterator[list[Streams]]:
    """Workers of a fresh run, each with a connection of its own."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(url)) for _ in range(num)]
        workers = [
            Streams(client, Keys("benchmark"), QueueSettings(), consumer=f"worker-{number}")
            for number, client in enumerate(clients)
        ]
        await workers[0].clear()
        yield workers
        await workers[0].clear()


if __name__ == "__main__":
    main()
