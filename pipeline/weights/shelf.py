"""Which versions can still be fetched.

In: new weight objects, and what receivers ask for. Out: the newest object, and the few older ones
whose transfer is under way. Memory is bounded by `keep` objects whatever the receivers do.

The receiver that has waited longest for a whole object is the one that is protected: however fast
versions follow each other it finishes, and then queues behind all others. So nobody starves.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import WeightError
from pipeline.weights.codec import WeightObject
from pipeline.weights.protocol import NOTHING

_MAX_PINS = 4096


@dataclass(slots=True)
class _Pin:
    """What a receiver fetches. turn: its place in the queue, taken when it began and kept until it has finished."""

    version: int
    turn: int
    seen_at: float


class Shelf:
    """Weight objects by version; used by the publishing and the serving thread.

    keep: objects held at most, 2 or more. idle_s: a receiver that asks for nothing for so long no
    longer protects its version.
    """

    def __init__(self, *, keep: int, idle_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        if keep < 2:
            raise ValueError(f"keep = {keep}: one version to receive and one that is newer make 2")
        self._keep = keep
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[int, WeightObject] = {}  # ascending versions
        self._pins: OrderedDict[bytes, _Pin] = OrderedDict()  # by receiver, the one last seen at the end
        self._turns = 0

    def check(self, version: int) -> None:
        """Raises WeightError unless `version` is higher than all before: no version is made twice."""
        newest = self._newest_version()
        if version <= newest:
            raise WeightError(f"weight version {version} is not newer than {newest}, which is published")

    def put(self, item: WeightObject) -> None:
        """Make `item` the newest. Raises as `check` does."""
        with self._lock:
            self.check(item.manifest.weight_version)
            self._objects[item.manifest.weight_version] = item
            self._evict()

    def newest(self) -> WeightObject | None:
        """What a joiner gets; None before the first."""
        with self._lock:
            return self._objects.get(self._newest_version())

    def start_transfer(self, receiver: bytes, newer_than: int) -> WeightObject | None:
        """The newest object, protected for `receiver`; None where none is newer."""
        with self._lock:
            version = self._newest_version()
            if version <= newer_than:
                return None
            self._pin(receiver, version)
            return self._objects[version]

    def find(self, receiver: bytes, version: int, root: bytes) -> WeightObject | None:
        """That very object, still protected for `receiver`; None where it is gone."""
        with self._lock:
            item = self._objects.get(version)
            if item is None or item.manifest.root != root:
                return None
            self._pin(receiver, version)
            return item

    def end_transfer(self, receiver: bytes) -> None:
        """`receiver` needs its version no more."""
        with self._lock:
            self._pins.pop(receiver, None)
            self._evict()

    def sweep(self) -> None:
        """Let go of what idle receivers protected."""
        with self._lock:
            self._evict()

    @property
    def num_objects(self) -> int:
        """Objects held."""
        return len(self._objects)

    @property
    def num_receivers(self) -> int:
        """Transfers under way."""
        return len(self._pins)

    def _newest_version(self) -> int:
        return next(reversed(self._objects), NOTHING)

    def _pin(self, receiver: bytes, version: int) -> None:
        pin = self._pins.get(receiver)
        if pin is None:
            pin = self._pins[receiver] = _Pin(version, self._turns, 0.0)
            self._turns += 1
        pin.version, pin.seen_at = version, self._clock()
        self._pins.move_to_end(receiver)
        if len(self._pins) > _MAX_PINS:
            self._pins.popitem(last=False)

    def _evict(self) -> None:
        now = self._clock()
        while self._pins and now - next(iter(self._pins.values())).seen_at > self._idle_s:
            self._pins.popitem(last=False)
        kept = {self._newest_version()}
        for pin in sorted(self._pins.values(), key=lambda pin: pin.turn):
            if len(kept) < self._keep and pin.version in self._objects:
                kept.add(pin.version)
        for version in self._objects.keys() - kept:
            del self._objects[version]
