"""Work with a publisher, for as long as it is where it was.

In: an address, a way to look it up, and work on the connection to it. Out: the work's result, or
word that the address is another. A look-up that fails says nothing: weights may flow while the
registry is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from pipeline.weights.state import Endpoints

LOOK_EVERY_S = 0.5

Result = TypeVar("Result")
Resolve: TypeAlias = Callable[[], Awaitable[Endpoints | None]]


class MovedError(Exception):
    """The publisher is elsewhere now, or nowhere."""


async def unless_moved(work: Coroutine[Any, Any, Result], endpoints: Endpoints, resolve: Resolve) -> Result:
    """The result of `work`. Raises MovedError when `resolve` gives something else than `endpoints` first."""
    over = asyncio.Event()
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_until_moved(endpoints, resolve, over))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done() or watch.exception() is not None:
            return await task
        raise MovedError
    finally:
        over.set()
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        # What it raised knows this frame: together they would keep all that the work held, such as a whole version.
        del task, watch


async def _until_moved(endpoints: Endpoints, resolve: Resolve, over: asyncio.Event) -> None:
    """over: ends it at the next turn, should a `resolve` swallow the cancellation."""
    while not over.is_set():
        await asyncio.sleep(LOOK_EVERY_S)
        if await resolve() != endpoints:
            return
