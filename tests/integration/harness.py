"""A run for tests: settings, real worker processes, and views through the classes that workers use.

In: settings. Out: processes against the session's server. A worker that fails without being meant
to fails the test at once and shows its log; all are ended in the end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from pipeline.config import Config
from pipeline.fleet import Fleet, WorkerInfo
from pipeline.keys import CONSUMER_GROUP, Keys, Stream
from pipeline.settings.files import load_config
from pipeline.streams import Ledger, Streams, connect
from tests.integration.processes import Worker, start_process
from tests.integration.served import Served, served_at

POLL_S = 0.02
# Nothing is concluded from how long something takes: this is for what would never come.
DEADLINE_S = 180.0

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
    "worker.drain_timeout_s=60.0",
    "worker.log_format='json'",
    "weights.poll_s=0.2",
    "checkpoint.every_steps=0",
    "tracking.samples_per_step=1000",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said, on both of its outputs."""

    code: int
    out: str


@dataclass(eq=False)
class Run:
    """One run: its settings, its processes, and what Redis and its directory know of it."""

    config: Config
    overrides: Sequence[str]
    directory: Path
    redis: Redis
    workers: list[Worker] = field(default_factory=list)

    # Processes

    def start(self, role: str, *extra: str, may_fail: bool = False, skew_s: float = 0.0) -> Worker:
        """Start one worker; extra: settings of its own. may_fail: it is meant to end with an error.

        skew_s: how far its clock is ahead.
        """
        log = self.directory / f"{self.config.run.name}-{len(self.workers)}-{role}.log"
        words = [word for item in [*self.overrides, *extra] for word in ("--set", item)]
        self.workers.append(start_process([role, *words], log, may_fail=may_fail, skew_s=skew_s))
        return self.workers[-1]

    def start_all(self, *, generators: int = 1, scorers: int = 1) -> Worker:
        """Start generators, scorers and the trainer, which is returned."""
        for _ in range(generators):
            self.start("generator")
        for _ in range(scorers):
            self.start("scorer")
        return self.start("trainer")

    def end(self) -> None:
        """Kill what still runs."""
        for worker in self.workers:
            if worker.code is None:
                worker.kill()

    async def command(self, *words: str) -> Answer:
        """What the command `rollstream WORDS` says of this run."""
        settings = [word for item in self.overrides for word in ("--set", item)]
        log = self.directory / f"command-{time.monotonic_ns()}.log"
        asked = start_process([*words, *settings], log, may_fail=True)
        await self.until(lambda: asked.code is not None, f"an answer to {words}")
        return Answer(int(asked.code or 0), asked.output)

    # Waiting

    async def until(
        self, condition: Callable[[], bool | Awaitable[bool]], what: str, *, deadline_s: float = DEADLINE_S
    ) -> None:
        """Wait for a condition; when it does not come, the workers' output says why."""
        end = time.monotonic() + deadline_s
        while True:
            value = condition()
            if await value if isinstance(value, Awaitable) else value:
                return
            self.refuse_crashes()
            if time.monotonic() > end:
                raise AssertionError(f"not within {deadline_s} s: {what}\n{self._tails()}")
            await asyncio.sleep(POLL_S)

    def refuse_crashes(self) -> None:
        """Fail if a worker has ended with an error that was not meant."""
        crashed = [worker.tail for worker in self.workers if worker.has_crashed]
        assert not crashed, "\n".join(crashed)

    async def until_exit(self, *workers: Worker, deadline_s: float = DEADLINE_S) -> list[int]:
        """Exit codes of these workers, once all have ended."""
        names = ", ".join(worker.role for worker in workers)
        await self.until(
            lambda: all(worker.code is not None for worker in workers), f"exit of {names}", deadline_s=deadline_s
        )
        return [int(worker.code or 0) for worker in workers]

    async def until_over(self, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until every worker that was not killed has ended with exit code 0."""
        codes = await self.until_exit(
            *[worker for worker in self.workers if not worker.may_fail], deadline_s=deadline_s
        )
        assert set(codes) == {0}, codes

    async def until_steps(self, number: int, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the trainer has done `number` steps."""
        await self.until(lambda: self.num_steps >= number, f"step {number}", deadline_s=deadline_s)

    async def until_trained(self, number: int, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until `number` groups have been trained."""

        async def enough() -> bool:
            return (await self.ledger()).trained >= number

        await self.until(enough, f"{number} trained groups", deadline_s=deadline_s)

    async def until_stopped(self, workers: Sequence[Worker], when: Callable[[], Awaitable[bool]], what: str) -> None:
        """Stop these workers (SIGSTOP) at a moment at which `when` holds, so that it still holds afterwards."""

        async def is_caught() -> bool:
            for worker in workers:
                worker.signal(signal.SIGSTOP)
            if await when():
                return True
            for worker in workers:
                worker.signal(signal.SIGCONT)
            return False

        await self.until(is_caught, what)

    async def until_ready(self, *workers: Worker) -> list[WorkerInfo]:
        """What the registry says of these workers, once they can do their work."""
        found: list[WorkerInfo] = []

        async def all_ready() -> bool:
            by_pid = {info.pid: info for info in await self.fleet.workers() if info.status.get("ready")}
            found[:] = [by_pid[worker.pid] for worker in workers if worker.pid in by_pid]
            return len(found) == len(workers)

        await self.until(all_ready, "workers that are ready")
        return found

    # Views

    @property
    def streams(self) -> Streams:
        """For looking at the run; claims nothing by itself."""
        return Streams(self.redis, Keys(self.config.run.name), self.config.queues, consumer="test")

    @property
    def fleet(self) -> Fleet:
        """Registry and control."""
        return Fleet(self.redis, Keys(self.config.run.name))

    async def ledger(self) -> Ledger:
        """The account of the run, which must balance whenever it is looked at."""
        ledger = await self.streams.ledger()
        assert ledger.balances, ledger
        return ledger

    async def info(self, worker: Worker) -> WorkerInfo | None:
        """What the registry says of a worker."""
        return next((info for info in await self.fleet.workers() if info.pid == worker.pid), None)

    async def num_held(self, worker_id: str) -> int:
        """Groups that a worker holds in any of the streams."""
        held = 0
        for key in Keys(self.config.run.name).streams:
            held += len(await self.redis.xpending_range(key, CONSUMER_GROUP, "-", "+", 1000, worker_id))
        return held

    async def num_in_streams(self) -> int:
        """Entries of all streams."""
        return sum(depth.length for depth in (await self.streams.depths()).values())

    async def backlog(self, stream: Stream) -> int:
        """Entries of a stream that no one holds."""
        return (await self.streams.depths())[stream].backlog

    async def metric(self, worker: Worker, name: str, **labels: str) -> float:
        """The sum of one metric's series at a worker's own endpoint, over labels that are not given."""
        return (await self.served(worker)).total(name, **labels)

    async def served(self, worker: Worker) -> Served:
        """All metrics of a worker, as they are at one moment."""
        return await served_at(await self.address(worker))

    async def address(self, worker: Worker) -> str:
        """Where a worker's endpoints are."""
        info = await self.info(worker)
        assert info is not None, f"{worker.role} is not in the registry"
        return info.address

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl."""
        return self.records("metrics.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Those of optimiser steps."""
        return [row for row in self.metrics if "groups" in row]

    @property
    def num_steps(self) -> int:
        """The last step that metrics.jsonl tells of."""
        return int(max((row["step"] for row in self.steps), default=0))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Every group that was trained, in the order of training."""
        return [sample for sample in self.records("samples.jsonl") if not sample["is_evaluation"]]

    @property
    def times_trained(self) -> Counter[str]:
        """Group id -> how often it was in a step."""
        return Counter(sample["group_id"] for sample in self.samples)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of one of the run's files, parsed."""
        path = self.config.run_dir / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def _tails(self) -> str:
        return "\n".join(worker.tail for worker in self.workers)


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
        run.refuse_crashes()
    finally:
        run.end()
        await redis.aclose()
