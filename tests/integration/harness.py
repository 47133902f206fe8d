"""Real worker processes for tests: started, watched, killed, and always ended.

In: settings. Out: processes of `rollstream ROLE` against the session's server, and views of the
run through the same classes that the workers use.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from pipeline.config import Config
from pipeline.config_files import load_config
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.streams import Ledger, Streams, connect

POLL_S = 0.05
DEADLINE_S = 60.0
_ROOT = Path(__file__).parents[2]

# Quick leases and heartbeats, so that takeovers happen within a test's patience.
SCRIPTED = (
    "generation.engine='scripted'",
    "generation.group_size=4",
    "generation.max_tokens=64",
    "generation.scripted.length_mean=16",
    "generation.scripted.tokens_per_s=2000",
    "trainer.groups_per_step=4",
    "trainer.max_steps=10",
    "scoring.rewards=[{function='tests.integration.rewards:spread'}]",
    "scoring.num_processes=1",
    "queues.lease_s=2.0",
    "worker.heartbeat_s=0.3",
    "worker.drain_timeout_s=10.0",
    "worker.log_format='json'",
    "weights.poll_s=0.2",
    "checkpoint.every_steps=0",
)


@dataclass(eq=False)
class Worker:
    """One process and the file with its output."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """Everything it has printed."""
        return self.log.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, object]]:
        """Its log, parsed; lines that are not JSON are left out."""
        found = []
        for line in self.output.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        os.kill(self.process.pid, number)


@dataclass(eq=False)
class Run:
    """One run: its settings, its processes, and what Redis knows of it."""

    config: Config
    overrides: Sequence[str]
    directory: Path
    redis: Redis
    workers: list[Worker] = field(default_factory=list)

    @property
    def streams(self) -> Streams:
        """For looking at the run; claims nothing by itself."""
        return Streams(self.redis, Keys(self.config.run.name), self.config.queues, consumer="test")

    @property
    def fleet(self) -> Fleet:
        """Registry and control."""
        return Fleet(self.redis, Keys(self.config.run.name))

    def start(self, role: str, *extra: str) -> Worker:
        """Start one worker; extra: settings of its own."""
        log = self.directory / f"{role}-{len(self.workers)}.log"
        words = [word for item in [*self.overrides, *extra] for word in ("--set", item)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "ROLLSTREAM_PARENT_PID": str(os.getpid())}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.cli", role, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env=environ,
            )
        worker = Worker(role, process, log)
        self.workers.append(worker)
        return worker

    def start_all(self, *, generators: int = 1, scorers: int = 1) -> Worker:
        """Start generators, scorers and the trainer, which is returned."""
        for _ in range(generators):
            self.start("generator")
        for _ in range(scorers):
            self.start("scorer")
        return self.start("trainer")

    async def ledger(self) -> Ledger:
        """The account of the run, which must balance whenever it is looked at."""
        ledger = await self.streams.ledger()
        assert ledger.balances, ledger
        return ledger

    async def until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, *, deadline_s: float = DEADLINE_S
    ) -> None:
        """Wait for a condition; on time-out the workers' output says why it did not come."""
        end = time.monotonic() + deadline_s
        while True:
            value = condition()
            if await value if isinstance(value, Awaitable) else value:
                return
            if time.monotonic() > end:
                raise AssertionError(f"not within {deadline_s} s: {what}\n{self._tails()}")
            await asyncio.sleep(POLL_S)

    async def until_exit(self, worker: Worker, *, deadline_s: float = DEADLINE_S) -> int:
        """Exit code of a worker."""
        await self.until(lambda: worker.process.poll() is not None, f"exit of {worker.role}", deadline_s=deadline_s)
        return int(worker.process.returncode)

    async def until_steps(self, number: int, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the trainer has done `number` steps."""
        await self.until(lambda: self.num_steps >= number, f"step {number}", deadline_s=deadline_s)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Rows of metrics.jsonl."""
        path = self.config.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    @property
    def num_steps(self) -> int:
        """Steps that metrics.jsonl tells of."""
        return int(max((row["step"] for row in self.metrics if "loss" in row or "groups" in row), default=0))

    def end(self) -> None:
        """Kill what still runs."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()

    def _tails(self) -> str:
        return "\n".join(f"--- {worker.role}\n{worker.output[-1500:]}" for worker in self.workers)


@asynccontextmanager
async def running(directory: Path, url: str, name: str, *overrides: str) -> AsyncIterator[Run]:
    """A run without workers yet; everything is ended afterwards."""
    words = [
        f"run.name={json.dumps(name)}",
        f"run.dir={json.dumps(str(directory / 'runs'))}",
        f"redis.url={json.dumps(url)}",
        *overrides,
    ]
    config = load_config([], environ={}, overrides=words)
    redis = connect(config.redis)
    run = Run(config=config, overrides=words, directory=directory, redis=redis)
    try:
        await run.streams.open()
        yield run
    finally:
        run.end()
        await redis.aclose()
