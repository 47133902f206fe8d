"""Throughput by the number of generators, and how soon it is back after half of them were killed.

One whole run under a supervisor, with scripted generators that take as long as they are told, so that
16 of them need little of the processors. They are asked for as `rollstream scale` asks, 1, 4 and 16,
while the run goes on; then half of them get SIGKILL, and the supervisor starts them again. Rates are
those of trained groups, between ends of steps.

    python -m benchmarks.scaling --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from redis.asyncio import Redis

from benchmarks.report import report
from pipeline.config import Config
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.local.cores import available_cores
from pipeline.local.crew import Crew
from pipeline.local.run import LocalRun
from pipeline.local.supervisor import Supervisor
from pipeline.records.recorder import read_metrics
from pipeline.scaling import GENERATOR, Scaling
from pipeline.settings.files import load_config
from pipeline.streams import Streams, connect

_GROUP_SIZE, _GROUPS_AT_ONCE, _GROUPS_PER_STEP = 4, 4, 4
_LENGTH = 64
_MAX_STALENESS = 63
_BACK_AFTER_S = 5.0
_SETTLE_S, _READY_S, _LOOK_EVERY_S = 5.0, 90.0, 0.05
NUMBERS = (1, 4, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is measured. group_s: that a group takes in its generator. window_s: of each rate."""

    numbers: Sequence[int]
    group_s: float
    window_s: float


class Measurement:
    """A run that goes on, and what is asked of it."""

    def __init__(self, config: Config, redis: Redis, supervisor: Supervisor, load: Load) -> None:
        keys = Keys(config.run.name)
        self._config = config
        self._fleet, self._scaling = Fleet(redis, keys), Scaling(redis, keys)
        self._streams = Streams(redis, keys, config.queues, consumer="benchmark")
        self._supervisor = supervisor
        self._load = load

    async def results(self) -> dict[str, float]:
        """Rates for each number of generators, then with half of the last number killed."""
        rates: dict[int, float] = {}
        for number in self._load.numbers:
            await self._until_there(number)
            await asyncio.sleep(_SETTLE_S)
            rates[number] = await self._rate()
        first, last = self._load.numbers[0], self._load.numbers[-1]
        victims = [self._supervisor.pids[f"{GENERATOR}-{index + 1}"] for index in range(last // 2)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        there = asyncio.create_task(self._until_replaced(victims))
        await asyncio.sleep(_BACK_AFTER_S)
        back = await self._rate()
        there_after_s, start_processor_s = await there
        ledger = await self._streams.ledger()
        lost = ledger.fed - ledger.trained - ledger.live
        return {
            **{f"efficiency_{number}": rates[number] / rates[first] * first / number for number in rates},
            "recovered_share": back / rates[last],
            "recovered_within_s": _BACK_AFTER_S,
            "lost": lost,
            "refused": ledger.refused,
            **{f"groups_per_s_{number}": rate for number, rate in rates.items()},
            "groups_per_s_by_lengths": _GROUPS_AT_ONCE / self._load.group_s,
            "all_there_after_s": there_after_s,
            "start_processor_s": start_processor_s,
            "all_there_limit_s": start_processor_s * len(victims) / available_cores(),
        }

    async def _until_there(self, number: int) -> None:
        """So many generators, at work."""
        asked = False
        async with asyncio.timeout(_READY_S):
            while True:
                asked = asked or await self._scaling.ask({GENERATOR: number}) is not None
                if asked and len(await self._ready()) == number and self._num_steps():
                    return
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _until_replaced(self, victims: Sequence[int]) -> tuple[float, float]:
        """Until as many new generators as there were victims can work.

        Returns the seconds since the call, and how long one of them has had a processor by then.
        """
        called, before = time.monotonic(), self._generators() - set(victims)
        async with asyncio.timeout(_READY_S):
            while True:
                new = await self._ready() - before - set(victims)
                if len(new) >= len(victims):
                    break
                await asyncio.sleep(_LOOK_EVERY_S)
        times = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in new]
        return time.monotonic() - called, statistics.fmean(times)

    def _generators(self) -> set[int]:
        return {pid for name, pid in self._supervisor.pids.items() if name.startswith(GENERATOR)}

    async def _ready(self) -> set[int]:
        """Processes of generators that can work."""
        return {worker.pid for worker in await self._fleet.workers() if worker.status.get("ready")} & self._generators()

    async def _rate(self) -> float:
        """Trained groups a second over the window, or until there is a step, by the trainer's clock."""
        first = self._num_steps()
        await asyncio.sleep(self._load.window_s)
        async with asyncio.timeout(_READY_S):
            while self._num_steps() == first:  # noqa: ASYNC110 - the trainer's file is all there is to look at
                await asyncio.sleep(_LOOK_EVERY_S)
        rows = self._rows()
        return (len(rows) - first) * _GROUPS_PER_STEP / (rows[-1]["run_s"] - rows[first - 1]["run_s"])

    def _rows(self) -> list[dict[str, float]]:
        return [row for row in read_metrics(self._config.run_dir) if "groups" in row]

    def _num_steps(self) -> int:
        return len(self._rows())


async def scaling(load: Load) -> dict[str, float]:
    """All results of one run."""
    with tempfile.TemporaryDirectory() as folder, LocalRun(_config(Path(folder), load), _CREW, persist=False) as local:
        lines: list[str] = []
        supervisor = local.supervisor(lambda name, line: lines.append(f"{name}: {line}"))
        running = asyncio.create_task(local.run(supervisor, lines.append))
        async with connect(local.config.redis) as redis:
            measuring = asyncio.create_task(Measurement(local.config, redis, supervisor, load).results())
            await asyncio.wait([running, measuring], return_when=asyncio.FIRST_COMPLETED)
            supervisor.stop()
            code = await running
            ledger = await local.ledger()
        if not measuring.done() or measuring.exception() or code != 0 or ledger is None or not ledger.balances:
            measuring.cancel()
            await asyncio.wait([measuring])
            why = "" if measuring.cancelled() else repr(measuring.exception())
            raise SystemExit("\n".join([*lines[-20:], f"the run ended with {code}, {ledger} {why}"]))
    return {name: round(value, 4) for name, value in measuring.result().items()}


_CREW = Crew(has_exporter=False)


def _config(directory: Path, load: Load) -> Config:
    settings = (
        "run.name='scaling'",
        f"run.dir={json.dumps(str(directory))}",
        "generation.engine='scripted'",
        f"generation.group_size={_GROUP_SIZE}",
        f"generation.max_num_seqs={_GROUPS_AT_ONCE * _GROUP_SIZE}",
        f"generation.max_tokens={_LENGTH}",
        f"generation.scripted.length_mean={_LENGTH}",
        f"generation.scripted.tokens_per_s={_LENGTH / load.group_s}",
        f"trainer.groups_per_step={_GROUPS_PER_STEP}",
        "trainer.max_steps=1000000000",
        f"staleness.max_staleness={_MAX_STALENESS}",
        # The trainer is no part of what is measured: few versions, and steps that take no time.
        "weights.publish_every=16",
        "scoring.rewards=[{function='length', kwargs={at_most=32, slack=64}}]",
        "scoring.num_processes=1",
        "queues.lease_s=4.0",
        "worker.heartbeat_s=1.0",
        "checkpoint.every_steps=0",
        "tracking.samples_per_step=0",
        "worker.log_level='warning'",
    )
    return load_config([], environ={}, overrides=settings)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--numbers", type=int, nargs="+", default=NUMBERS, help="generators, fewest first")
    parser.add_argument("--group-s", type=float, default=1.0, help="seconds that a group takes in its generator")
    parser.add_argument("--window-s", type=float, default=15.0, help="seconds over which each rate is measured")
    arguments = parser.parse_args()
    numbers = list(arguments.numbers)
    if min(numbers) < 1 or numbers[-1] < 2 or numbers != sorted(set(numbers)):
        sys.exit("error: --numbers rise, begin with 1 or more, and end with 2 or more")
    if min(arguments.group_s, arguments.window_s) <= 0:
        sys.exit("error: --group-s and --window-s are above 0")
    load = Load(numbers=numbers, group_s=arguments.group_s, window_s=arguments.window_s)
    report("scaling", asyncio.run(scaling(load)), as_json=arguments.json)


if __name__ == "__main__":
    main()
