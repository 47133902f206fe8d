"""An engine that stands still ends its generator, so that others can go on with its groups.

In: what an engine says of its progress. Out: an EngineLostError, and nothing as long as tokens come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pipeline.engines import GenerationEngine
from pipeline.errors import EngineLostError

_MAX_LOOK_S = 1.0
_LOOKS = 10  # at the least, before it is believed


class Watchdog:
    """Looks at an engine from time to time.

    may_rest: whether it is to stand still now. stall_s: seconds with unfinished sequences and without a
    token. What passes while this process itself stood still does not count.
    """

    def __init__(self, engine: GenerationEngine, stall_s: float, may_rest: Callable[[], bool]) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._may_rest = may_rest

    async def run(self) -> None:
        """Raises EngineLostError when the engine stands still; until then it never returns. Cancel it."""
        look_s = min(_MAX_LOOK_S, self._stall_s / _LOOKS)
        still_s, num_tokens = 0.0, -1
        while still_s < self._stall_s:
            started = time.monotonic()
            await asyncio.sleep(look_s)
            waits = self._engine.num_unfinished_seqs > 0 and not self._may_rest()
            has_moved = num_tokens != self._engine.num_tokens_generated
            num_tokens = self._engine.num_tokens_generated
            still_s = still_s + min(time.monotonic() - started, 2 * look_s) if waits and not has_moved else 0.0
        raise EngineLostError(
            f"the engine has {self._engine.num_unfinished_seqs} sequences and drew no token for {self._stall_s:g} s "
            "(generation.stall_s): this generator ends, and others go on with its groups"
        )
