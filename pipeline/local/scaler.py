"""Carries out in a running `up` what `rollstream scale` asks for.

In: numbers of workers in Redis, by role. Out: workers that a supervisor starts or drains, and
a line that says so. A worker that has left by itself is not replaced: the number falls with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable

from redis.exceptions import RedisError

from pipeline.local.supervisor import Supervisor, WorkerSpec
from pipeline.scaling import Scaling

_LOOK_EVERY_S = 0.5
_GONE_AFTER_S = 5.0


class Scaler:
    """Keeps as many workers of each role as is asked for.

    numbers: those that were started. spec_of(role, index, number): how to start the worker with this
    index, from 0, of so many.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        numbers: dict[str, int],
        spec_of: Callable[[str, int, int], WorkerSpec],
        say: Callable[[str], None],
    ) -> None:
        self._supervisor = supervisor
        self._numbers = numbers
        self._spec_of = spec_of
        self._say = say
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._answers = True

    @property
    def numbers(self) -> dict[str, int]:
        """Workers of each role that are to be there; empty while another `up` answers, or once this one ends."""
        return dict(self._numbers) if self._answers and not self._supervisor.is_stopping else {}

    async def run(self, scaling: Scaling) -> None:
        """Look for requests until cancelled; then let others answer."""
        try:
            while True:
                # The workers say that the server is away; what is asked for later is heard later.
                with contextlib.suppress(RedisError, OSError):
                    await self._look(scaling)
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(_GONE_AFTER_S):
                    await scaling.leave(self._holder)

    async def _look(self, scaling: Scaling) -> None:
        there = {role: len(self._indexes(role)) for role in self._numbers}
        said = {role: (self._numbers[role], min(self._numbers[role], there[role])) for role in self._numbers}
        wanted = await scaling.keep(self._holder, said, ttl_s=_GONE_AFTER_S)
        if (wanted is not None) != self._answers:
            self._answers = wanted is not None
            if not self._answers:
                self._say("another `up` of this run answers `rollstream scale`")
        for role, number in (wanted or {}).items():
            self._carry_out(role, there[role], number)

    def _carry_out(self, role: str, num_there: int, number: int) -> None:
        self._numbers[role] = number
        if number == num_there or self._supervisor.is_stopping:
            return
        self._say(f"{role}s: {num_there} -> {number}")
        for index in self._free_indexes(role, number - num_there):
            self._supervisor.add(self._spec_of(role, index, number))
        for index in self._indexes(role)[number:]:
            self._supervisor.let_go(f"{role}-{index + 1}")

    def _indexes(self, role: str) -> list[int]:
        """Those that are to stay, in order."""
        return sorted(index for index in map(_index_in(role), self._supervisor.staying) if index is not None)

    def _free_indexes(self, role: str, number: int) -> list[int]:
        """The lowest that nobody has, who is still leaving included."""
        taken = set(map(_index_in(role), self._supervisor.names))
        return [index for index in range(len(taken) + max(0, number)) if index not in taken][: max(0, number)]


def _index_in(role: str) -> Callable[[str], int | None]:
    def index_of(name: str) -> int | None:
        head, _, number = name.rpartition("-")
        return int(number) - 1 if head == role and number.isdigit() else None

    return index_of
