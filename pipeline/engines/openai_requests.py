"""What one server has been asked for and has not ended.

In: answers that are being filled. Out: limits on them, all at once: their server is out of rotation, or gets
other weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from pipeline.engines.openai_answers import Answer


class Requests:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._limits: dict[Answer, asyncio.Timeout] = {}
        self._are_over = asyncio.Event()

    def __len__(self) -> int:
        return len(self._limits)

    @contextlib.asynccontextmanager
    async def asking(self, answer: Answer) -> AsyncIterator[None]:
        """While an answer is waited for. Raises TimeoutError where it was ended."""
        async with asyncio.timeout(None) as limit:
            self._limits[answer] = limit
            self._are_over.clear()
            try:
                yield
            finally:
                del self._limits[answer]
                if not self._limits:
                    self._are_over.set()

    async def until_over(self) -> None:
        """Returns when there is none."""
        if self._limits:
            await self._are_over.wait()

    def end(self) -> None:
        """All of them, now."""
        for limit in self._limits.values():
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def weights_change(self) -> None:
        """What comes from now on may be drawn by others."""
        for answer in self._limits:
            answer.weights_change()

    def distrust(self) -> None:
        """Nobody knows what drew any of it."""
        for answer in self._limits:
            answer.distrust()
