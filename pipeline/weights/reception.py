"""What receivers have in common, whichever way weights come: what they hold, where they put it, what they count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pipeline.config import WeightSettings
from pipeline.errors import WeightError
from pipeline.weights.choice import Choice
from pipeline.weights.manifest import Manifest
from pipeline.weights.memory import Pool, Warming
from pipeline.weights.protocol import NOTHING
from pipeline.weights.state import WeightState
from pipeline.weights.subscriber_stats import SubscriberStats
from pipeline.weights.throttle import Throttle
from pipeline.weights.transfer import Content


def floor_of(newer_than: int | None) -> int:
    """The version that the next one has to be above. Raises ValueError for what is none."""
    if newer_than is None:
        return NOTHING
    if type(newer_than) is not int or newer_than < NOTHING:
        raise ValueError(f"newer_than = {newer_than!r} is no weight version: an int of 0 or more, or None for any")
    return newer_than


class Reception(ABC):
    """A receiver without the way. make_pool: where versions of a size are received."""

    def __init__(self, settings: WeightSettings, make_pool: Callable[[int], Pool]) -> None:
        self._settings = settings
        self._held: Content | None = None  # the last that is complete, which patches start from
        self._choice = Choice(settings.encoding)
        self._throttle = Throttle(settings.max_mbit_per_s * 1e6 / 8)
        self._make_pool = make_pool
        self._pool = make_pool(0)
        self._warming: Warming | None = None
        self._receive_s = 0.0  # of what is coming in
        self._stats = SubscriberStats()

    async def next(self, newer_than: int | None) -> WeightState:
        """The newest version above `newer_than` (None: any), verified. Waits as long as it must.

        Cancelling it is safe, and what has come so far is used by the next call. The state has
        memory of its own, which is used again only after every view of it is gone.
        """
        return (await self.next_content(newer_than)).state()

    @abstractmethod
    async def next_content(self, newer_than: int | None) -> Content:
        """The same as it lies in memory."""

    def start_from(self, content: Content) -> None:
        """Patches may start from a version that came another way."""
        self._held = content

    @property
    def is_receiving(self) -> bool:
        """Whether this process receives by itself."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Free everything, after `next` has returned or was cancelled. Safe to call twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _borrow(self, manifest: Manifest) -> memoryview:
        """Memory for a version. Raises WeightError where there is none.

        Where patches may follow, the second version needs as much again, which is made while the first comes in: a
        joiner has to catch up with what was published meanwhile, and fresh pages take longer than its patches.
        """
        self._end_warming()
        is_first = self._pool.buffer_bytes != manifest.num_bytes
        if is_first:
            self._pool = self._make_pool(manifest.num_bytes)
        try:
            borrowed = self._pool.borrow()
            if is_first and manifest.num_bytes and self._settings.encoding != "snapshot":
                self._warming = Warming(self._pool.borrow())
        except MemoryError as error:
            raise WeightError(
                f"no memory for the {manifest.num_bytes} bytes of version {manifest.weight_version}"
            ) from error
        return borrowed

    def _end_warming(self) -> None:
        if self._warming is not None:
            self._warming.end()
            self._warming = None

    def _complete(
        self, content: Content, *, is_patched: bool, made_s: float = 0.0, num_received_bytes: int, verify_s: float
    ) -> Content:
        """Hold what has come, and count it. made_s: seconds that it took to make it for us."""
        manifest = content.manifest
        self._choice.note(is_patches=is_patched, seconds=self._receive_s + made_s, num_bytes=manifest.num_bytes)
        self._held = None if self._settings.encoding == "snapshot" else content
        self._stats.arrived(
            manifest,
            is_patched=is_patched,
            num_received_bytes=num_received_bytes,
            receive_s=self._receive_s,
            verify_s=verify_s,
        )
        return content
