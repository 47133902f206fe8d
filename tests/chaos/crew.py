"""Workers of every role, each with someone in its place as soon as it has ended.

In: a run. Out: as many of each role as were asked for, whatever ends them. An end that nobody
wanted is remembered with its log.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.integration.harness import Run
from tests.integration.processes import Worker

ROLES = {"generator": 3, "scorer": 2, "trainer": 1, "exporter": 1}
_LOOK_EVERY_S = 0.02
_REPLACED = "took the run over"


@dataclass(eq=False)
class Crew:
    """The workers of a run.

    roles: how many of each. problems: ends that nobody wanted. skew_s: of the clocks of those that start next.
    """

    run: Run
    roles: Mapping[str, int] = field(default_factory=lambda: dict(ROLES))
    settings: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)
    skew_s: dict[str, float] = field(default_factory=dict)
    _present: list[Worker] = field(default_factory=list)
    _is_ending: bool = False

    def start(self) -> None:
        """Everyone."""
        for role, number in self.roles.items():
            for _ in range(number):
                self.add(role)

    def add(self, role: str) -> Worker:
        """One more."""
        worker = self.run.start(role, *self.settings, may_fail=True, skew_s=self.skew_s.pop(role, 0.0))
        self._present.append(worker)
        return worker

    def of(self, role: str) -> list[Worker]:
        """Those of a role that run."""
        return [worker for worker in self._present if worker.role == role and worker.code is None]

    def any_of(self, role: str, chance: random.Random) -> Worker | None:
        """One of them; None where there is none at the moment."""
        there = self.of(role)
        return chance.choice(there) if there else None

    async def keep(self) -> None:
        """Put someone in the place of whoever has ended; never returns."""
        while True:
            self.refill()
            await asyncio.sleep(_LOOK_EVERY_S)

    def refill(self) -> None:
        """Look once."""
        for worker in [worker for worker in self._present if worker.code is not None]:
            self._present.remove(worker)
            self._judge(worker)
        for role, number in self.roles.items():
            for _ in range(number - len(self.of(role)) if not self._is_ending else 0):
                self.add(role)

    async def drain_trainer(self) -> None:
        """Nobody takes its place, nor that of anyone else any more."""
        self._is_ending = True
        (trainer, *_) = self.of("trainer") or [self.add("trainer")]
        trainer.signal(signal.SIGTERM)
        await self.run.until(lambda: trainer.code is not None, "the end of a trainer that was asked to drain")
        self.refill()

    async def end(self, *settings: str) -> None:
        """A trainer with these settings brings the run to its end, and all exit."""
        self.settings = (*self.settings, *settings)
        last = self.add("trainer")
        for role in ("generator", "scorer"):
            for _ in range(self.roles[role] - len(self.of(role))):
                self.add(role)
        await self.run.until(lambda: last.code is not None, "the end of the last trainer", deadline_s=300.0)
        await self.run.until(lambda: not any(map(self.of, self.roles)), "the end of everyone else")
        self.refill()

    def _judge(self, worker: Worker) -> None:
        is_replaced = worker.role == "trainer" and worker.code == 1 and _REPLACED in worker.tail
        if worker.code not in {0, -signal.SIGKILL} and not is_replaced:
            self.problems.append(worker.tail)
