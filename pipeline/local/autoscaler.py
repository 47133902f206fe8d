"""Watches a run and asks for other numbers of workers when `pipeline.local.autoscale` says so.

In: what Redis holds of the run, every second. Out: requests as `rollstream scale` makes them, and a
line with the reason. After each change it watches anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.config.scoring import ModelAtWork
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.local.autoscale import SOURCES, Decision, IdleClock, Sample, decide, signals_of
from pipeline.local.crew import TRAINER
from pipeline.queues.accounts import Accounts
from pipeline.roster import WorkerInfo
from pipeline.scaling import GENERATOR, JUDGE, SCORER, TEACHER, Scaling

_SAMPLES = 10  # in a window


class Autoscaler:
    """For one `up`.

    numbers: how many workers it keeps, by role; empty while another `up` answers for the run, or it ends.
    """

    def __init__(self, config: Config, numbers: Callable[[], dict[str, int]], say: Callable[[str], None]) -> None:
        self._settings = config.autoscale
        self._slots = slots_of(config)
        self._numbers = numbers
        self._say = say
        self._samples: deque[Sample] = deque()
        self._idle = IdleClock()
        self._seen: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._changed_at = time.monotonic() - self._settings.cool_down_s

    async def run(self, redis: Redis, keys: Keys, scaling: Scaling) -> None:
        """Watch until cancelled."""
        fleet, accounts = Fleet(redis, keys), Accounts(redis, keys, consumer="autoscaler")
        while True:
            # Nothing is decided while the server is away.
            with contextlib.suppress(RedisError, OSError):
                await self._look(fleet, accounts, scaling)
            await asyncio.sleep(self._settings.window_s / _SAMPLES)

    async def _look(self, fleet: Fleet, accounts: Accounts, scaling: Scaling) -> None:
        numbers, facts = self._numbers(), await fleet.facts()
        if facts.is_paused or facts.stop_reason is not None:
            self._samples.clear()  # nobody works, and that says nothing of how many there should be
            return
        if numbers != self._seen:
            self._samples.clear()
            if self._seen:
                self._changed_at = time.monotonic()
            self._seen, self._asked = numbers, {}
        if not numbers:
            return
        workers, depths = [worker for worker in await fleet.workers() if worker.is_alive], await accounts.depths()
        now = time.monotonic()
        trainer = next((worker for worker in workers if worker.role == TRAINER and worker.status.get("step")), None)
        self._samples.append(
            Sample(
                at=now - (trainer.age_s if trainer else 0.0),
                trainer=trainer.worker_id if trainer else "",
                idle_s=self._idle.read(trainer.worker_id, trainer.status) if trainer else None,
                waiting={role: depths[stream].backlog for role, stream in SOURCES.items()},
                in_work={role: depths[stream].pending for role, stream in SOURCES.items()},
                num_ready={role: _number(workers, role, ready=True) for role in SOURCES},
                num_workers={role: _number(workers, role) for role in SOURCES},
            )
        )
        while len(self._samples) > 2 and self._samples[-1].at - self._samples[1].at >= self._settings.window_s:
            self._samples.popleft()
        signals = signals_of(self._samples, numbers, self._slots, since_change_s=now - self._changed_at)
        for decision in decide(signals, self._settings):
            if self._numbers() != numbers:
                return  # they have changed, or the `up` has begun to end, while the server was asked
            await self._ask(scaling, decision, numbers[decision.role])

    async def _ask(self, scaling: Scaling, decision: Decision, there: int) -> None:
        """It may be decided once more before it has been carried out; what a person asks for meanwhile stays."""
        role, number = decision.role, decision.number
        asked = self._asked.get(role, there)
        if await scaling.ask({role: number}, instead_of={role: asked}) != {role: asked}:
            self._asked.pop(role, None)
        elif number != asked:
            self._asked[role] = number
            self._say(f"autoscale: {there} -> {number} {role}s: {decision.reason}")


def slots_of(config: Config) -> dict[str, float]:
    """Groups that one worker has in work together when it is busy, by role."""
    group_size, scoring = config.generation.group_size, config.scoring
    return {
        GENERATOR: max(1.0, config.generation.max_num_seqs / group_size),
        SCORER: float(scoring.num_processes),
        TEACHER: _at_once(scoring.teachers, group_size),
        JUDGE: _at_once(scoring.judges, group_size),
    }


def _at_once(models: Sequence[ModelAtWork], group_size: int) -> float:
    """Groups that a worker has its models look at together; all of them see every group."""
    if not all(model.url for model in models):
        return 1.0  # one in the process takes one group after another
    return max(1.0, min((model.max_concurrency for model in models), default=1) / group_size)


def _number(workers: Sequence[WorkerInfo], role: str, *, ready: bool = False) -> int:
    return sum(worker.role == role and (not ready or bool(worker.status.get("ready"))) for worker in workers)
