"""Weights that a vLLM worker fetches from the trainer itself, while it generates.

In: where the trainer publishes, and from which version on. Out: one verified `WeightState` at a
time, held until it is taken; an adapter as the full weights that it makes. Fetching, verifying and
merging happen in a thread with a loop of its own; nothing that the worker calls here waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config import LoraSettings, ModelSettings, WeightSettings
from pipeline.errors import WeightError
from pipeline.models.merging import LoraMerger
from pipeline.weights import Endpoints, WeightState
from pipeline.weights.receiver import create_receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What adapters are merged into. dtype: that is served."""

    model: ModelSettings
    lora: LoraSettings
    dtype: torch.dtype


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
        self._base: Base | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()  # of the loop, like whoever waits for it

    @property
    def status(self) -> dict[str, Any]:
        """weight_version: that has come, was verified and waits to be taken, or None. problem: why none will."""
        state = self._state
        return {"weight_version": None if state is None else state.weight_version, "problem": self._problem}

    def follow(
        self,
        publisher: Mapping[str, str],
        settings: Mapping[str, Any],
        *,
        newer_than: int,
        base: Base | None = None,
    ) -> None:
        """Fetch the newest version above `newer_than`, unless it is there already. Returns at once.

        publisher: fields of `Endpoints`. settings: of `WeightSettings`. base: of adapters, where they are
        fetched. Raises TypeError, ValueError.
        """
        endpoints, chosen = Endpoints(**publisher), WeightSettings.model_validate(settings)
        if self._loop is None:
            self._loop, self._asked = asyncio.new_event_loop(), asyncio.Event()
            self._thread = threading.Thread(target=self._loop.run_forever, name="weight-pull", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._ask, endpoints, chosen, newer_than, base)

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

    def _ask(self, endpoints: Endpoints, settings: WeightSettings, newer_than: int, base: Base | None) -> None:
        assert self._loop is not None
        self._endpoints, self._newer_than = endpoints, newer_than
        if self._task is not None and (settings, base) != (self._settings, self._base):
            self._task.cancel()
            self._task = None
        if self._task is None or self._task.done():
            self._problem = ""  # of an attempt that is over
            self._settings, self._base = settings, base
            self._task = self._loop.create_task(self._receive(settings, base))
        self._asked.set()

    async def _receive(self, settings: WeightSettings, base: Base | None) -> None:
        try:
            merger = await asyncio.to_thread(LoraMerger, base.model, base.lora, dtype=base.dtype) if base else None
            with contextlib.closing(create_receiver(settings, self._where)) as subscriber:
                while True:
                    self._asked.clear()
                    while (state := self._state) is None or state.weight_version <= self._newer_than:
                        self._state = state = None  # two models are never in memory at once
                        arrived = await subscriber.next(self._newer_than)
                        self._state = await asyncio.to_thread(merger.merge, arrived) if merger else arrived
                        del arrived
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
