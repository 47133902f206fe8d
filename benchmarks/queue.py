"""What a hop between two stages costs, against the bare server and against the usual pattern.

A hop is: bounded push, read, acknowledge-and-delete, with leases, ledger and all guarantees on, in
batches of 2 KiB groups. Compared with `redis-benchmark XADD -P 16` (a C client that only appends)
and with one XADD for each sample and XREAD COUNT 1. All run against one server, in turn, several
times; the medians of the rounds are reported.

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
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from redis.asyncio import Redis

from benchmarks.report import report
from pipeline.config import QueueSettings, RedisSettings
from pipeline.embedded import EmbeddedServer
from pipeline.keys import Keys, Stream
from pipeline.messages import (
    Completion,
    FinishReason,
    PromptGroup,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    VersionSpan,
)
from pipeline.streams import DropReason, Entry, Lease, Moved, Streams, connect
from pipeline.wire import decode, encode

PAYLOAD_BYTES = 2048
_WARM_UP = 2048


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
    parser.add_argument("--batch", type=int, default=256, help="groups in one call")
    parser.add_argument("--pairs", type=int, default=2, help="producers, and consumers, at once")
    arguments = parser.parse_args()
    program = shutil.which("redis-benchmark")
    if program is None:
        sys.exit("redis-benchmark is not on PATH: install it, for example `apt-get install redis-tools`")
    load = Load(num_groups=arguments.groups, batch=arguments.batch, pairs=arguments.pairs)
    with EmbeddedServer.start() as server:
        results = asyncio.run(compare(program, server, load, arguments.rounds))
    report("queue", results, as_json=arguments.json)


async def compare(program: str, server: EmbeddedServer, load: Load, rounds: int) -> dict[str, float]:
    """Rates in groups a second, medians over the rounds, and the two ratios."""
    measurements: dict[str, Callable[[int], Awaitable[float]]] = {
        "redis_benchmark": lambda num: redis_benchmark(program, server, 2 * num),
        "hop": lambda num: hop(server.url, load, num),
        "xadd_xread1": lambda num: xadd_xread1(server.url, num // 8),
        "hand_over": lambda num: hand_over(server.url, load, num),
        "hand_over_coded": lambda num: hand_over(server.url, load, num // 4, is_coded=True),
    }
    for measure in measurements.values():
        await measure(_WARM_UP)
    rows = [{name: await measure(load.num_groups) for name, measure in measurements.items()} for _ in range(rounds)]
    rates = {f"{name}_per_s": round(statistics.median(row[name] for row in rows)) for name in measurements}
    return {
        "hop_vs_redis_benchmark": _median_ratio(rows, "hop", "redis_benchmark"),
        "hop_vs_xadd_xread1": _median_ratio(rows, "hop", "xadd_xread1"),
        "hand_over_vs_redis_benchmark": _median_ratio(rows, "hand_over", "redis_benchmark"),
        **rates,
        "payload_bytes": PAYLOAD_BYTES,
        "batch": load.batch,
    }


def _median_ratio(rows: Sequence[dict[str, float]], ours: str, theirs: str) -> float:
    return round(statistics.median(row[ours] / row[theirs] for row in rows), 3)


async def redis_benchmark(program: str, server: EmbeddedServer, num: int) -> float:
    """Appends a second of the C client, sixteen in flight on each of its fifty connections."""
    where = ["-s", str(server.socket_path), "-P", "16", "-n", str(num), "--csv"]
    command = ["XADD", "bare", "*", "payload", "x" * PAYLOAD_BYTES]
    done = await asyncio.to_thread(
        subprocess.run, [program, *where, *command], check=True, stdout=subprocess.PIPE, text=True
    )
    async with _client(server.url) as client:
        await client.delete("bare")
    # "command","rps",...: the command holds no quotes, the rate is what follows it.
    return float(done.stdout.splitlines()[-1].rpartition(PAYLOAD_BYTES * "x")[2].split(",")[1].strip('"'))


async def hop(url: str, load: Load, num: int) -> float:
    """Groups a second that are fed, claimed and taken out, producers and consumers at once."""
    payload = b"x" * PAYLOAD_BYTES
    entries = [Entry(group_id=f"{n:08d}", weight_version=0, payload=payload, ordinal=n) for n in range(num)]
    batches = iter(range(0, num, load.batch))
    room = asyncio.Semaphore(4 * load.pairs)
    num_out = 0

    async def produce(streams: Streams) -> None:
        for start in batches:
            await room.acquire()
            batch = [_without_ordinal(entry) for entry in entries[start : start + load.batch]]
            assert await streams.feed(batch, limit=num) == len(batch)

    async def consume(streams: Streams) -> None:
        nonlocal num_out
        while num_out < num:
            leases = await streams.claim(Stream.PROMPTS, load.batch, block_s=0.05)
            num_out += await streams.drop(leases, DropReason.STALE)
            for _ in range(len(leases) // load.batch):
                room.release()

    async with _workers(url, 2 * load.pairs) as workers:
        producers, consumers = workers[: load.pairs], workers[load.pairs :]
        started = time.perf_counter()
        await asyncio.gather(*(produce(each) for each in producers), *(consume(each) for each in consumers))
        rate = num / (time.perf_counter() - started)
        ledger = await workers[0].ledger()
        assert ledger.balances and ledger.num_dropped == num, ledger
    return rate
