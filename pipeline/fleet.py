"""The fleet of a run: who is there, what they agree on, what they are asked to do.

In: signs of life from workers, requests from people. Out: the same, seen from every machine. All
ages are measured by the clock of Redis, never by the clocks of workers. A stop ends the workers
that were there when it was said, so that it never reaches a later run of the same name; taking
the trainer's lock clears what is left of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgpack
from redis.exceptions import ResponseError

from pipeline.agreement import differences
from pipeline.errors import ConfigError, RunConflictError, TrainerReplacedError, few
from pipeline.keys import META_OF_ALL_RUNS, TAKEN_BY, Keys, run_of
from pipeline.messages import Endpoints
from pipeline.queues.connection import Script, passes, until_accepted
from pipeline.queues.foreign import integer
from pipeline.roster import (
    MICROSECONDS,
    Control,
    RunFacts,
    WorkerInfo,
    endpoints_text,
    new_worker_id,
    read_endpoints,
    read_worker,
    record_of,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["Control", "Fleet", "RunFacts", "WorkerInfo", "new_worker_id"]

_MODELS_THAT_SCORE = ("agreed:scoring.teachers", "agreed:scoring.judges")  # lists as JSON
# Long enough to be seen and asked about; every start of a worker has an id of its own.
_FORGET_AFTER_S = 180.0
_Result = TypeVar("_Result")


class Fleet:
    """Registry and control of one run."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._started: dict[str, str] = {}
        folder = resources.files("pipeline") / "scripts" / "fleet"
        self._scripts = {
            file.name.removesuffix(".lua"): Script(redis, file.read_text(encoding="utf-8"))
            for file in folder.iterdir()
            if file.name.endswith(".lua")
        }

    async def _call(
        self, name: str, keys: Sequence[str], args: Sequence[str | int | bytes], *, waits: bool = True
    ) -> Any:
        """Every script may be sent twice when a reply gets lost; the second time changes nothing."""
        return await self._accepted(lambda: self._scripts[name].call(keys, args), waits=waits)

    async def _accepted(self, call: Callable[[], Awaitable[_Result]], *, waits: bool = True) -> _Result:
        return await until_accepted(self._redis, self._keys, call, waits=waits)

    async def _together(self, *commands: Sequence[str]) -> list[Any]:
        """The replies to some commands, executed at one instant."""
        return cast(list[Any], await self._call("together", [self._keys.meta], [msgpack.packb(commands)]))

    # --- what all workers agree on -------------------------------------------------------------

    async def join(self, fingerprint: Mapping[str, str], *, resolved: str = "") -> str:
        """Join the run; the first to join fixes `fingerprint`. Returns the run's id.

        resolved: the whole configuration, without secrets, kept with the run.
        Raises RunConflictError naming every key that differs.
        """
        pairs = [text for pair in sorted(fingerprint.items()) for text in pair]
        answer = await self._call("join", [self._keys.meta], [secrets.token_hex(8), resolved, *pairs])
        differing = [item.decode() for item in answer[1:]]
        if differing:
            raise RunConflictError(_conflict(self._keys.run, differing, fingerprint))
        return cast(str, answer[0].decode())

    async def refuse_unknown(self) -> None:
        """Raises ConfigError, naming the runs that there are, when the server knows nothing of this one."""
        if await self._redis.exists(self._keys.meta, self._keys.workers, *self._keys.streams):
            return
        others = few(await self.other_runs())
        raise ConfigError(
            f"run.name = {self._keys.run!r}: the server knows no such run (runs there: {others}); "
            "name one with --run, or the server that has it with redis.url (REDIS_URL)"
        )

    async def other_runs(self) -> list[str]:
        """Names of the other runs that the server has."""
        found = [run_of(key.decode()) async for key in self._redis.scan_iter(match=META_OF_ALL_RUNS, count=1000)]
        return [run for run in found if run != self._keys.run]

    # --- signs of life and requests ------------------------------------------------------------

    async def register(self, worker: WorkerInfo) -> Control:
        """Enter the registry. The worker's start is now."""
        self._started.pop(worker.worker_id, None)
        return await self.beat(worker)

    async def beat(self, worker: WorkerInfo) -> Control:
        """Say that the worker is alive and what it does; hear what it is asked to do.

        Never waits: whoever beats does so again, and tells meanwhile why it was refused.
        """
        started, paused, stop_reason, drain, version, run_id = await self._call(
            "beat",
            [self._keys.workers, self._keys.control, self._keys.meta],
            [worker.worker_id, self._started.get(worker.worker_id, ""), record_of(worker), _failure(worker.role)],
            waits=False,
        )
        self._started[worker.worker_id] = started.decode()
        return Control(
            paused=paused is not None,
            stop_reason=_text(stop_reason),
            drain=drain is not None,
            weight_version=integer(self._keys, self._keys.meta, version),
            run_id=_text(run_id),
        )

    async def deregister(self, worker_id: str, *, role: str = "", why_failed: str = "") -> None:
        """Leave the registry, and with it every request to this worker.

        why_failed: kept for those who look at the run from other machines, until another of its role starts.
        """
        kept = [("HSET", self._keys.meta, _failure(role), why_failed)] if why_failed and _failure(role) else []
        await self._together(
            ("HDEL", self._keys.workers, worker_id), ("HDEL", self._keys.control, f"drain:{worker_id}"), *kept
        )
        self._started.pop(worker_id, None)

    async def workers(self) -> list[WorkerInfo]:
        """Everyone in the registry, the lost included; those lost for long are removed.

        Sorted by role and id.
        """
        (seconds, microseconds), records = await self._together(("TIME",), ("HGETALL", self._keys.workers))
        now_us = int(seconds) * 1_000_000 + int(microseconds)
        found: list[WorkerInfo] = []
        for worker_id, value in zip(records[::2], records[1::2], strict=True):
            read = read_worker(worker_id.decode("utf-8", "replace"), value, now_us)
            if read is None:
                continue
            worker, beat = read
            if not worker.is_alive and worker.age_s > _FORGET_AFTER_S:
                await self._forget(worker.worker_id, beat)
                continue
            found.append(worker)
        return sorted(found, key=lambda worker: (worker.role, worker.worker_id))

    async def _forget(self, worker_id: str, beat: str) -> None:
        try:
            await self._call("forget", [self._keys.workers, self._keys.control], [worker_id, beat], waits=False)
        except ResponseError as error:
            # Who only looks at the fleet need not wait for a server that takes no writes.
            if not passes(error):
                raise

    async def pause(self) -> None:
        """Ask every stage to claim nothing; work in flight goes on."""
        await self._hset(self._keys.control, {"paused": "1"})

    async def resume(self) -> None:
        """End a pause."""
        await self._accepted(lambda: self._redis.hdel(self._keys.control, "paused"))

    async def stop(self, reason: str) -> None:
        """The run is over: every worker that is there now drains and exits."""
        await self._call("stop", [self._keys.control], [reason])

    async def drain(self, target: str) -> list[str]:
        """Ask one worker, or all of a role that are there now, to leave. Returns their ids, none of lost ones."""
        there = [worker for worker in await self.workers() if worker.is_alive]
        chosen = [worker.worker_id for worker in there if target in {worker.role, worker.worker_id}]
        if chosen:
            await self._hset(self._keys.control, {f"drain:{worker_id}": "1" for worker_id in chosen})
        return chosen

    async def facts(self) -> RunFacts:
        """The run as a whole, at one instant."""
        roles = TAKEN_BY.values()
        clock, known, failures, (paused, stop_reason), trainer = await self._together(
            ("TIME",),
            ("HMGET", self._keys.meta, "run_id", "created_at", "weight_version", *_MODELS_THAT_SCORE),
            ("HMGET", self._keys.meta, *map(_failure, roles)),
            ("HMGET", self._keys.control, "paused", "stop_reason"),
            ("GET", self._keys.trainer_lock),
        )
        run_id, created_at, version, teachers, judges = known
        return RunFacts(
            at=int(clock[0]) + int(clock[1]) / MICROSECONDS,
            run_id=_text(run_id),
            created_at=float(integer(self._keys, self._keys.meta, created_at) or 0),
            weight_version=integer(self._keys, self._keys.meta, version),
            is_paused=paused is not None,
            stop_reason=_text(stop_reason),
            trainer=_text(trainer),
            has_teachers=_text(teachers) not in {None, "[]"},
            has_judges=_text(judges) not in {None, "[]"},
            failures={role: text for role, why in zip(roles, failures, strict=True) if (text := _text(why))},
        )

    async def forget_run(self) -> int:
        """Remove every key of this run, groups and accounts included. Returns how many keys that were.

        Raises RunConflictError while a worker of the run is alive.
        """
        try:
            alive = [worker.worker_id for worker in await self.workers() if worker.is_alive]
        except RunConflictError:  # what is there is no registry: it goes with the rest
            alive = []
        if alive:
            raise RunConflictError(
                f"run.name = {self._keys.run!r}: {', '.join(alive)} still at work; stop them first, "
                "for example with `rollstream drain`"
            )
        keys = [key async for key in self._redis.scan_iter(match=self._keys.pattern, count=1000)]
        return int(await self._redis.unlink(*keys)) if keys else 0

    # --- weights -------------------------------------------------------------------------------

    async def set_endpoints(self, endpoints: Endpoints, *, trainer: str = "") -> None:
        """Say where weights are published.

        trainer: who says so. Raises TrainerReplacedError where another trainer has taken the run over since.
        """
        await self._call("set_endpoints", [self._keys.meta], [endpoints_text(endpoints), trainer])

    async def endpoints(self) -> Endpoints | None:
        """Where weights are published; None where no trainer says so, or has written what stands there."""
        return read_endpoints(await self._hget(self._keys.meta, "endpoints"))

    async def set_version(self, weight_version: int, *, trainer: str = "") -> int:
        """Raise the run's weight version; it never falls. Returns what it is now.

        trainer: who says so. Raises TrainerReplacedError where another trainer has taken the run over since.
        """
        return int(await self._call("set_version", [self._keys.meta], [weight_version, trainer]))

    async def version(self) -> int | None:
        """Newest weight version of the run; None before the first."""
        return integer(self._keys, self._keys.meta, await self._hget(self._keys.meta, "weight_version"))

    # --- the one trainer -----------------------------------------------------------------------

    async def acquire_trainer(self, worker_id: str, ttl_s: float) -> bool:
        """Take the right to train, for `ttl_s`; False while another trainer holds it.

        Taking it clears an old stop: the run goes on.
        """
        return await self._lock(worker_id, ttl_s, "take")

    async def renew_trainer(self, worker_id: str, ttl_s: float) -> bool:
        """Prolong it, also after it expired. False when another took it since: train nothing more."""
        return await self._lock(worker_id, ttl_s, "renew")

    async def hold_trainer(self, worker_id: str, ttl_s: float) -> None:
        """Prolong it. Raises TrainerReplacedError when another took it since."""
        if not await self.renew_trainer(worker_id, ttl_s):
            raise TrainerReplacedError(
                f"another trainer ({(await self.facts()).trainer or 'gone since'}) took the run over, because this "
                f"one was silent for longer than {ttl_s:g} s (some worker.heartbeat_s, at most queues.lease_s)"
            )

    async def release_trainer(self, worker_id: str) -> bool:
        """Give it up, and with it the addresses of its publisher; False when another holds it, which stays as it is."""
        return bool(await self._call("unlock", [self._keys.trainer_lock, self._keys.meta], [worker_id]))

    async def trainer_holder(self) -> tuple[str, float] | None:
        """Who has the right to train, and for how many seconds more unless it is prolonged; None where nobody has."""
        holder, left_ms = await self._together(("GET", self._keys.trainer_lock), ("PTTL", self._keys.trainer_lock))
        return None if holder is None else (holder.decode(), max(0, left_ms) / 1000)

    async def device_turn(self, worker_id: str, ttl_s: float, how: str, wish: str) -> str:
        """Ask for the device of a colocated run, keep it or give it; see `scripts/fleet/turn.lua`."""
        keys = [self._keys.device_turn, self._keys.device_wish]
        return cast(str, (await self._call("turn", keys, [worker_id, int(ttl_s * 1000), how, wish])).decode())

    async def _lock(self, worker_id: str, ttl_s: float, how: str) -> bool:
        keys = [self._keys.trainer_lock, self._keys.control, self._keys.meta]
        return bool(await self._call("lock", keys, [worker_id, int(ttl_s * 1000), how]))

    async def _hget(self, key: str, name: str) -> bytes | None:
        return await self._accepted(lambda: cast("Awaitable[bytes | None]", self._redis.hget(key, name)))

    async def _hset(self, key: str, mapping: Mapping[str, str]) -> None:
        pairs = [text for pair in mapping.items() for text in pair]
        await self._accepted(lambda: self._redis.hset(key, items=pairs))


def _failure(role: str) -> str:
    """Where it is kept why a worker has failed; empty for a role that no group needs."""
    return f"failed:{role}" if role in TAKEN_BY.values() else ""


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _conflict(run: str, differing: Sequence[str], own: Mapping[str, str]) -> str:
    theirs = dict(zip(differing[::2], differing[1::2], strict=True))
    named = differences({key: own[key] for key in theirs}, theirs, "in the run")
    return (
        f"run.name = {run!r} was started with other settings: {named}. Make them equal, choose another run.name, or, "
        f"when it is over, begin anew: `rollstream reset --run {run} --with-records` removes it from the server and "
        "moves its directory aside, with the checkpoints that were written with the other settings"
    )
