"""Several pieces of work at once, of which the first that fails ends the others.

In: coroutines. Out: their results in order, or the one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from pipeline.errors import RollstreamError

_Result = TypeVar("_Result")


async def together(work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Raises what the first that failed has raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except* RollstreamError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
