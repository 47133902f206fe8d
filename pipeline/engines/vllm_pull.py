"""Weights that a vLLM worker fetches from the trainer itself, while it generates.

In: where the trainer publishes, and from which version on. Out: one verified `WeightState` at a
time, held until it is taken. Fetching and verifying happen in a thread with a loop of its own;
nothing that the worker calls here waits for the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from pipeline.config import WeightSettings
from pipeline.errors import WeightError
from pipeline.weights import Endpoints, WeightState
from pipeline.weights.receiver import create_receiver


class WeightPull:
    """A subscriber in a thread of this process, from the first `follow` until `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._state: WeightState | None = None
        self._problem = ""
        # Below: only touched by the thread.
        self._endpoints: Endpoints | None = None
        self._newer_than = -1
        self._settings: WeightSettings | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    @property
    def status(self) -> dict[str, Any]:
        """weight_version: that has come, was verified and waits to be taken, or None. problem: why none will."""
        state = self._state
        return {"weight_version": None if state is None else state.weight_version, "problem": self._problem}

    def follow(self, publisher: Mapping[str, str], settings: Mapping[str, Any], *, newer_than: int) -> None:
        """Fetch the newest version above `newer_than`, unless it is there already. Returns at once.

        publisher: fields of `Endpoints`. settings: of `WeightSettings`. Raises TypeError, ValueError.
        """
        endpoints, chosen = Endpoints(**publisher), WeightSettings.model_validate(settings)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="weight-pull", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._ask, endpoints, chosen, newer_than)

    def take(self, weight_version: int) -> WeightState:
        """The state of this version, which is no longer kept here. Raises WeightError: another, or none."""
        state = self._state
        if state is None or state.weight_version != weight_version:
            raise WeightError(f"version {weight_version} was not fetched; what is there: {self.status}")
        self._state = None
        return state

    def close(self) -> None:
        """End the thread, and forget what it fetched. Safe to call twice."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._state = None

    # In the thread

    def _ask(self, endpoints: Endpoints, settings: WeightSettings, newer_than: int) -> None:
        assert self._loop is not None
        self._endpoints, self._newer_than = endpoints, newer_than
        if self._task is not None and settings != self._settings:
            self._task.cancel()
            self._task, self._problem = None, ""
        if self._task is None or self._task.done():
            self._settings = settings
            self._task = self._loop.create_task(self._receive(settings))
        self._asked.set()

    async def _receive(self, settings: WeightSettings) -> None:
        try:
            with contextlib.closing(create_receiver(settings, self._where)) as subscriber:
                while True:
                    self._asked.clear()
                    while (state := self._state) is None or state.weight_version <= self._newer_than:
                        self._state = state = None  # two models are never in memory at once
                        self._state = await subscriber.next(self._newer_than)
                        self._problem = ""
                    await self._asked.wait()
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
            raise

    async def _where(self) -> Endpoints | None:
        return self._endpoints

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
