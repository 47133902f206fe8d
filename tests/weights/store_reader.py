"""A reader of `tests.weights.drift` in a process of its own: STORE RUN NUMBER_OF_VERSIONS.

Prints for each version: which, how many were patched so far at most 1, and whether it is right.
"""

from __future__ import annotations

import asyncio
import json
import sys

from pipeline.weights.store.subscriber import StoreSubscriber
from tests.weights.drift import drifted
from tests.weights.states import at, next_within, same
from tests.weights.stores import endpoints, settings_for


async def read(store: str, run: str, number: int) -> None:
    """Follow so many versions."""
    last, patched = None, 0
    async with StoreSubscriber(settings_for(store, encoding="delta"), resolve=at(endpoints(run))) as subscriber:
        for _ in range(number):
            state = await next_within(subscriber, last)
            last = state.weight_version
            is_patched, patched = subscriber.stats.num_patched - patched, subscriber.stats.num_patched
            print(json.dumps([last, is_patched, same(state, drifted(last))]), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(read(sys.argv[1], sys.argv[2], int(sys.argv[3])))
