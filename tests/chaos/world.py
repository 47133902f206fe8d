"""A whole run, everything that can go wrong with it, and how long it takes to get over that.

In: faults. Out: for each the time from the moment it was over (a killed worker: from the kill) until
the run had recovered: others hold what a killed worker held, a step follows what stopped them all.
"""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipeline.checkpoints import Checkpoints
from pipeline.keys import Keys, Stream
from tests.chaos.audit import Audit, audit
from tests.chaos.crew import ROLES, Crew
from tests.chaos.network import Stretch, stretch
from tests.chaos.schedule import Fault
from tests.chaos.server import MortalServer
from tests.integration.harness import SCRIPTED, Run, running

_SKEW_S = 3600.0
_PATIENCE_S = 240.0
_GROUPS_PER_STEP, _MAX_STALENESS = 8, 4
SETTINGS = (
    *SCRIPTED,
    "generation.scripted.length_mean=48",
    "generation.scripted.length_sigma=0.5",
    "generation.max_tokens=256",
    "generation.scripted.tokens_per_s=64",
    "generation.max_num_seqs=32",
    f"trainer.groups_per_step={_GROUPS_PER_STEP}",
    "trainer.max_steps=1000000",
    # Generation limits the rate, as it does in most runs.
    "trainer.scripted_step_s=0.15",
    f"staleness.max_staleness={_MAX_STALENESS}",
    "algorithm.max_refill=1000000",
    # What is killed again and again is tried again and again.
    "queues.max_attempts=50",
    "checkpoint.every_steps=4",
    "checkpoint.keep=1000000",
    "tracking.samples_per_step=0",
    "worker.drain_timeout_s=30.0",
)


class World:
    """One run and its faults. num_seen: faults so far, by kind. recoveries: seconds, by kind."""

    def __init__(
        self, run: Run, server: MortalServer, network: Stretch, mood: Path, seed: int, roles: Mapping[str, int]
    ) -> None:
        self.run, self.server, self.network = run, server, network
        self.crew = Crew(run, roles)
        self.recoveries: dict[Fault, list[float]] = {}
        self._mood = mood
        self._chance = random.Random(seed)
        self._foreign: set[str] = set()

    async def strike(self, fault: Fault) -> None:
        """Let it happen, and wait until the run has got over it."""
        started = time.monotonic()
        since, recovered = await self._inject(fault)
        try:
            await recovered
        except AssertionError as error:
            error.add_note(f"this was the recovery from {fault}")
            raise
        self.recoveries.setdefault(fault, []).append(time.monotonic() - max(since, started))

    async def end(self) -> Audit:
        """Let the run come to its end; what has become of every group."""
        await self.crew.drain_trainer()
        ledger = await self.run.streams.ledger()
        num_left = -(-(ledger.live + ledger.uncommitted) // _GROUPS_PER_STEP)
        saved = Checkpoints(self.run.config.run_dir / "checkpoints", self.run.config.checkpoint).latest()
        assert saved is not None
        await self.crew.end(f"trainer.max_steps={saved.step + num_left + 1}")
        return await audit(self.run, foreign=frozenset(self._foreign))

    async def num_trained(self) -> int:
        """Groups whose effect is in the present weights."""
        return (await self.run.streams.ledger()).trained

    async def _inject(self, fault: Fault) -> tuple[float, Awaitable[None]]:
        """Returns when the fault is over: since when to count, and the wait for the recovery."""
        kind, _, target = fault.value.partition("_")
        how: dict[str, Callable[[str], Awaitable[tuple[float, Awaitable[None]]]]] = {
            "kill": self._kill_redis if target == "redis" else self._kill,
            "stall": self._stall,
            "replace": self._replace,
            "drain": self._drain,
            "freeze": self._freeze,
            "forget": self._forget_scripts,
            "cut": self._cut,
            "fill": self._fill_disk,
            "skew": self._skew,
            "slow": self._spoil_mood,
            "failing": self._spoil_mood,
            "bad": self._put_in,
        }
        argument = kind if kind in {"slow", "failing"} else target
        return await how[kind](argument)

    # What can happen to workers

    async def _kill(self, role: str) -> tuple[float, Awaitable[None]]:
        if (worker := self.crew.any_of(role, self._chance)) is None:
            return time.monotonic(), _nothing()
        worker_id = await self._id_of(worker.pid)
        worker.kill()
        if role == "trainer":
            return time.monotonic(), self.until_versions(2)  # the first is what it has found
        return time.monotonic(), self._until_taken_over(worker_id) if worker_id else _nothing()

    async def _stall(self, role: str) -> tuple[float, Awaitable[None]]:
        """For longer than a lease."""
        if (worker := self.crew.any_of(role, self._chance)) is None:
            return time.monotonic(), _nothing()
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * self.run.config.queues.lease_s)
        if worker.code is None:
            worker.signal(signal.SIGCONT)
        return time.monotonic(), self.until_versions(1)

    async def _replace(self, role: str) -> tuple[float, Awaitable[None]]:
        """It stands still until another has taken its place and trained, and then goes on."""
        if (stale := self.crew.any_of(role, self._chance)) is None:
            return time.monotonic(), _nothing()
        stale.signal(signal.SIGSTOP)
        self.crew.add(role)
        await self.until_versions(2)
        stale.signal(signal.SIGCONT)
        await self.run.until(lambda: stale.code is not None, "the end of a trainer that was replaced")
        return time.monotonic(), self.until_versions(1)

    async def _drain(self, role: str) -> tuple[float, Awaitable[None]]:
        if (worker := self.crew.any_of(role, self._chance)) is None:
            return time.monotonic(), _nothing()
        worker.signal(signal.SIGTERM)

        return time.monotonic(), self.run.until(lambda: worker.code is not None, f"exit of a {role} that drains")

    async def _skew(self, role: str) -> tuple[float, Awaitable[None]]:
        """Someone whose clock is far off takes the place of another."""
        self.crew.skew_s[role] = self._chance.choice([-_SKEW_S, _SKEW_S])
        return await self._kill(role)

    async def _fill_disk(self, _: str) -> tuple[float, Awaitable[None]]:
        """No file of the trainer may grow, for two checkpoints."""
        if (worker := self.crew.any_of("trainer", self._chance)) is None:
            return time.monotonic(), _nothing()
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        await self.until_versions(8)
        if worker.code is None:
            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return time.monotonic(), self.until_versions(1)

    # What can happen to what they need

    async def _kill_redis(self, _: str) -> tuple[float, Awaitable[None]]:
        await self.server.kill()
        await self.server.restart()
        return time.monotonic(), self.until_versions(1)

    async def _freeze(self, _: str) -> tuple[float, Awaitable[None]]:
        self.server.freeze()
        await asyncio.sleep(self._chance.uniform(0.2, 1.0) * self.run.config.queues.lease_s)
        self.server.thaw()
        return time.monotonic(), self.until_versions(1)

    async def _forget_scripts(self, _: str) -> tuple[float, Awaitable[None]]:
        await self.run.redis.script_flush()
        return time.monotonic(), self.until_versions(1)

    async def _cut(self, _: str) -> tuple[float, Awaitable[None]]:
        await self.network.cut()
        await asyncio.sleep(self.run.config.queues.lease_s)
        await self.network.mend()
        return time.monotonic(), self.until_versions(_MAX_STALENESS + 2)  # with weights from after the cut

    async def _spoil_mood(self, mood: str) -> tuple[float, Awaitable[None]]:
        self._mood.write_text(mood)
        await asyncio.sleep(self.run.config.queues.lease_s)  # where it fails, no step may come
        self._mood.unlink()
        return time.monotonic(), self.until_versions(1)

    async def _put_in(self, where: str) -> tuple[float, Awaitable[None]]:
        """Bytes that nobody can read, as if they were a group of this stage."""
        stream = {"prompt": Stream.PROMPTS, "rollout": Stream.ROLLOUTS, "score": Stream.SCORED}[where]
        group_id = f"foreign-{len(self._foreign)}"
        self._foreign.add(group_id)
        keys = Keys(self.run.config.run.name)
        payload = self._chance.randbytes(self._chance.choice([0, 1, 40, 4000]))
        fields: dict[Any, Any] = {"group_id": group_id, "attempt": 1, "weight_version": 0, "created_at": 0, "schema": 1}
        async with self.run.redis.pipeline(transaction=True) as together:
            together.xadd(keys.stream(stream), {**fields, "payload": payload})
            together.hincrby(keys.ledger, "fed", 1)
            await together.execute()

        async def is_dead() -> bool:
            return group_id in {letter.group_id for letter in await self.run.streams.dead_letters()}

        return time.monotonic(), self.run.until(is_dead, f"death of what nobody can read in {stream.value}")

    # Recovery

    async def until_versions(self, number: int) -> None:
        """Until so many more weight versions are there: one when a trainer starts, one after each of its steps."""
        wanted = (await self.run.fleet.version() or 0) + number

        async def is_there() -> bool:
            return (await self.run.fleet.version() or 0) >= wanted

        await self.run.until(is_there, f"version {wanted}", deadline_s=_PATIENCE_S)

    async def _until_taken_over(self, worker_id: str) -> None:
        async def holds_nothing() -> bool:
            return await self.run.num_held(worker_id) == 0

        await self.run.until(holds_nothing, f"takeover of what {worker_id} held", deadline_s=_PATIENCE_S)

    async def _id_of(self, pid: int) -> str | None:
        return next((info.worker_id for info in await self.run.fleet.workers() if info.pid == pid), None)


async def _nothing() -> None:
    """There was nobody to happen it to."""


@asynccontextmanager
async def world(
    folder: Path, name: str, *settings: str, seed: int, roles: Mapping[str, int] = ROLES
) -> AsyncIterator[World]:
    """A run whose workers are kept at their number, on a server of its own."""
    server = MortalServer(folder / "server")
    # An address of the loopback network that nobody else uses stands for the trainer's machine.
    number = random.Random(name).randrange(1 << 16)
    advertised = f"127.77.{number >> 8}.{number & 255}"
    mood = folder / "mood"
    words = (
        *SETTINGS,
        f"weights.advertise='{advertised}'",
        f"scoring.rewards=[{{function='tests.chaos.rewards:moody', kwargs={{mood='{mood}'}}}}]",
        *settings,
    )
    try:
        async with running(folder, server.url, name, *words) as run, stretch(run.fleet, advertised) as network:
            here = World(run, server, network, mood, seed, roles)
            here.crew.start()
            keeping = asyncio.create_task(here.crew.keep())
            try:
                await here.until_versions(3)
                yield here
            finally:
                keeping.cancel()
                await asyncio.wait([keeping])
    finally:
        server.stop()
