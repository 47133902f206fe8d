"""Memory of every worker over minutes of traffic at full speed, late against early.

A whole run with the scripted engine, which waits for nothing, and the scripted trainer. The
resident memory of each worker and of the server is read twice a second; the median of the last
fifth is compared with the median of the second fifth.

    python -m benchmarks.soak --minutes 10 --json
    python -m benchmarks.soak --steps 2000 --groups-per-step 8 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.report import report
from pipeline.config import Config
from pipeline.keys import Keys
from pipeline.local.crew import Crew
from pipeline.local.run import LocalRun
from pipeline.local.supervisor import Supervisor
from pipeline.settings.files import load_config
from pipeline.streams import Streams, connect

_SAMPLE_S = 0.5


@dataclass(slots=True)
class Memory:
    """Resident bytes of each process over time, by worker."""

    samples: dict[str, list[int]] = field(default_factory=dict)

    def take(self, pids: dict[str, int]) -> None:
        """Read all processes once."""
        for name, pid in pids.items():
            try:
                self.samples.setdefault(name, []).append(psutil.Process(pid).memory_info().rss)
            except psutil.NoSuchProcess:
                continue

    def growth(self) -> dict[str, float]:
        """Late over early, for each worker."""
        found = {}
        for name, values in self.samples.items():
            fifth = max(1, len(values) // 5)
            early, late = statistics.median(values[fifth : 2 * fifth]), statistics.median(values[-fifth:])
            found[name] = round(late / early, 4)
        return found


def _config(directory: Path, steps: int, groups_per_step: int) -> Config:
    overrides = [
        "run.name='soak'",
        f"run.dir={json.dumps(str(directory))}",
        "generation.engine='scripted'",
        "generation.group_size=8",
        "generation.scripted.realtime=false",
        "generation.scripted.length_sigma=0.5",
        "generation.max_tokens=256",
        f"trainer.max_steps={steps or 10**9}",
        f"trainer.groups_per_step={groups_per_step}",
        "scoring.rewards=[{function='length', kwargs={at_most=32, slack=64}}]",
        "checkpoint.every_steps=200",
        "tracking.samples_per_step=0",
        "worker.log_level='warning'",
    ]
    return load_config([], environ={}, overrides=overrides)


async def _sample(supervisor: Supervisor, memory: Memory, seconds: float) -> None:
    """Until time is up, or it is cancelled. Those that leave at the end of the run are read no more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(_SAMPLE_S)
        memory.take(supervisor.pids)
    supervisor.stop()


async def _run(minutes: float, steps: int, groups_per_step: int) -> dict[str, object]:
    memory, started = Memory(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = _config(Path(folder), steps, groups_per_step)
        run = stack.enter_context(LocalRun(config, Crew(), persist=False))
        supervisor = run.supervisor(print)
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(_sample(supervisor, memory, math.inf if steps else minutes * 60))
            code = await supervisor.run()
            sampling.cancel()
        redis = connect(run.config.redis)
        ledger = await Streams(redis, Keys("soak"), run.config.queues, consumer="soak").ledger()
        await redis.aclose()
    growth = memory.growth()
    return {
        "largest_growth": max(growth.values()),
        "growth": growth,
        "resident_mib": {name: round(values[-1] / 2**20, 1) for name, values in memory.samples.items()},
        "groups_trained": ledger.trained,
        "ledger_balances": ledger.balances,
        "exit_code": code,
        "steps": ledger.trained // run.config.trainer.groups_per_step,
        "minutes": round((time.monotonic() - started) / 60, 2),
    }


def main() -> None:
    """Run for as long as was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=0, help="so many steps instead, however long they take")
    parser.add_argument("--groups-per-step", type=int, default=32)
    arguments = parser.parse_args()
    results = asyncio.run(_run(arguments.minutes, arguments.steps, arguments.groups_per_step))
    report("soak", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
