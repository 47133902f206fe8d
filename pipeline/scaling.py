"""How many workers a run is to have before its trainer: what people ask for, and the `up` that carries it out.

In: numbers from `rollstream scale` or an autoscaler. Out: the same to the one `up` that answers for
the run. It starts and ends nothing itself. An `up` that is gone answers for a few seconds more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from pipeline.keys import Keys
from pipeline.queues.connection import Script, until_accepted

if TYPE_CHECKING:
    from redis.asyncio import Redis

GENERATOR, SCORER, TEACHER, JUDGE = "generator", "scorer", "teacher", "judge"
SCALED_ROLES = (GENERATOR, SCORER, TEACHER, JUDGE)


class Scaling:
    """The numbers of one run. Its calls never wait: each raises what the server says, and may be repeated."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        folder = resources.files("pipeline") / "scripts" / "scaling"
        self._scripts = {
            name: Script(redis, (folder / f"{name}.lua").read_text(encoding="utf-8"))
            for name in ("ask", "keep", "leave")
        }

    async def ask(
        self, numbers: Mapping[str, int], *, instead_of: Mapping[str, int] | None = None
    ) -> dict[str, int] | None:
        """Ask for so many workers of each role. Returns what was asked for before; None where no `up` answers.

        instead_of: by role, what is to be replaced; where something else is asked for by now, that stays.
        """
        expected = instead_of or {}
        words = [text for role, number in numbers.items() for text in (role, number, expected.get(role, ""))]
        before = await self._call("ask", words)
        return dict(zip(numbers, map(int, before), strict=True)) if before else None

    async def is_heard(self) -> bool:
        """Whether the `up` has taken up all that was asked for; not where it left before."""
        asked, heard = await self._redis.hmget(self._keys.crew, ["asked", "heard"])
        return asked is not None and asked == heard

    async def kept(self) -> dict[str, int]:
        """What the `up` works towards, by role; empty where none answers."""
        found = await self._redis.hmget(self._keys.crew, [f"kept:{role}" for role in SCALED_ROLES])
        return {role: int(number) for role, number in zip(SCALED_ROLES, found, strict=True) if number is not None}

    async def keep(self, holder: str, numbers: Mapping[str, tuple[int, int]], *, ttl_s: float) -> dict[str, int] | None:
        """Say for each role how many `holder` was asked to keep and how many it keeps now; hear what is asked.

        The second number counts where nobody has asked for another than the first meanwhile.
        Returns None while another `up` answers for the run. Who is silent for `ttl_s` has left.
        """
        words = [text for role, (before, now) in numbers.items() for text in (role, before, now)]
        wanted = await self._call("keep", [holder, int(ttl_s * 1000), *words])
        return dict(zip(numbers, map(int, wanted), strict=True)) if wanted else None

    async def leave(self, holder: str) -> None:
        """Answer no longer."""
        await self._call("leave", [holder])

    async def _call(self, name: str, args: Sequence[str | int]) -> Any:
        script = self._scripts[name]
        return await until_accepted(self._redis, self._keys, lambda: script.call([self._keys.crew], args), waits=False)
