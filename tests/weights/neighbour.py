"""A process that follows weights as a generator does: `python -m tests.weights.neighbour FOLDER ENDPOINTS`.

It prints a line for each version that it has: version, checksum, and whether it receives itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from pipeline.weights import Endpoints
from pipeline.weights.sharing import SharedSubscriber
from tests.weights.states import FAST, at, checksum


async def follow(folder: Path, endpoints: Endpoints) -> None:
    # Who polls seldom takes nobody for silent whom a busy machine keeps standing for a moment.
    settings = FAST.model_copy(update={"tile_bytes": 16_384, "encoding": "delta", "poll_s": 2.0})
    async with SharedSubscriber(settings, resolve=at(endpoints), folder=folder) as subscriber:
        last = None
        while True:
            state = await subscriber.next(last)
            last = state.weight_version
            words = (last, checksum(state), int(subscriber.is_receiving), subscriber.stats.num_patched)
            sys.stdout.write(" ".join(map(str, words)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(follow(Path(sys.argv[1]), Endpoints(**json.loads(sys.argv[2]))))
