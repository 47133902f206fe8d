"""What stands in a key of the run and is not a run's.

In: keys, and what the server gave for them. Out: RunConflictError, which names the key and the way out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from redis.asyncio import Redis

from pipeline.errors import RunConflictError
from pipeline.keys import Keys


async def refuse_foreign_types(redis: Redis, keys: Keys) -> None:
    """Raises RunConflictError for a key that holds something of another type."""
    for key, wanted in keys.types.items():
        found = cast(bytes, await redis.type(key)).decode()
        if found not in {"none", wanted}:
            raise _conflict(
                keys, f"the key {key} on the server holds a {found}, where a run keeps a {wanted}"
            ) from None


@contextlib.contextmanager
def reading(keys: Keys, key: str) -> Iterator[None]:
    """Raises RunConflictError where a value in the key is no number or text as a run writes it."""
    try:
        yield
    except ValueError as error:
        raise _conflict(keys, f"the key {key} on the server holds what no run writes there ({error})") from error


def integer(keys: Keys, key: str, value: bytes | str | None) -> int | None:
    """A value in the key; None where there is none. Raises RunConflictError."""
    with reading(keys, key):
        return None if value is None else int(value)


def _conflict(keys: Keys, found: str) -> RunConflictError:
    return RunConflictError(
        f"run.name = {keys.run!r}: {found}; something else has written it. Choose another run.name, or remove all keys "
        f"of this one with `rollstream reset --run {keys.run}`"
    )
