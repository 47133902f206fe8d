"""A limit on how fast a receiver takes weights, so that they leave room on a line for other traffic."""

from __future__ import annotations

import asyncio

_BURST_S = 0.05  # of the rate may come at once


class Throttle:
    """rate: bytes per second; 0 for no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0  # when all that was admitted has passed at that rate

    def delay_s(self, num_bytes: int, now: float) -> float:
        """Seconds to wait before so many bytes may be ordered, which are counted as ordered."""
        if self._rate <= 0:
            return 0.0
        begins = max(self._free_at, now - _BURST_S)
        self._free_at = begins + num_bytes / self._rate
        return max(0.0, begins - now)

    async def admit(self, num_bytes: int) -> None:
        """Return when so many bytes may be ordered."""
        delay_s = self.delay_s(num_bytes, asyncio.get_running_loop().time())
        if delay_s > 0:
            await asyncio.sleep(delay_s)
