"""Which versions can still be fetched.

In: new weight objects, and what receivers ask for. Out: the newest object, the few older ones whose
transfer is under way, and what turns earlier versions into the newest. Memory is bounded by `keep`
objects, and by as much again as patches, whatever the receivers do.

The receiver that has waited longest for a whole object is the one that is protected: however fast
versions follow each other it finishes, and then queues behind all others. So nobody starves.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.weights.codec import WeightObject
from pipeline.weights.manifest import check_newer
from pipeline.weights.patches import PatchSet
from pipeline.weights.protocol import NOTHING

_MAX_PINS = 4096
_WANTED_S = 120.0
_WORTHWHILE = 0.5  # of a snapshot: patches that weigh more are not kept


@dataclass(slots=True)
class _Pin:
    """What a receiver fetches. turn: its place in the queue, taken when it began and kept until it has finished."""

    version: int
    turn: int
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From a version that a receiver has to the newest. steps: consecutive, one or more."""

    newest: WeightObject
    steps: Sequence[PatchSet]


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
        self._steps: OrderedDict[bytes, PatchSet] = OrderedDict()  # by root of the base, each to the next version
        self._folded: dict[bytes, PatchSet] = {}  # by root of the base, over several versions to the newest
        self._wishes: OrderedDict[bytes, float] = OrderedDict()  # receivers that want patches, and since when

    @property
    def are_patches_wanted(self) -> bool:
        """Whether someone has asked for them lately, and not for all after that."""
        with self._lock:
            return self._clock() - next(reversed(self._wishes.values()), -math.inf) < _WANTED_S

    def note_wish(self, receiver: bytes, *, wants_patches: bool) -> None:
        """What `receiver` has asked for now: it is what it will ask for next."""
        with self._lock:
            self._wishes.pop(receiver, None)
            if wants_patches:
                self._wishes[receiver] = self._clock()
                if len(self._wishes) > _MAX_PINS:
                    self._wishes.popitem(last=False)

    def check(self, version: int) -> None:
        """Raises WeightError unless `version` is higher than all before: no version is made twice."""
        check_newer(version, self._newest_version())

    def put(self, item: WeightObject, patches: PatchSet | None = None) -> None:
        """Make `item` the newest. patches: from the one before. Raises as `check` does."""
        with self._lock:
            self.check(item.manifest.weight_version)
            self._objects[item.manifest.weight_version] = item
            self._folded.clear()
            if patches is None:
                self._steps.clear()  # nothing leads over the gap
            else:
                self._steps[patches.table.base_root] = patches
                limit = item.manifest.num_bytes * _WORTHWHILE
                while self._steps and sum(step.num_bytes for step in self._steps.values()) > limit:
                    self._steps.popitem(last=False)
            self._evict()

    def withdraw(self, version: int) -> None:
        """It will never be complete."""
        with self._lock:
            item = self._objects.pop(version, None)
            if item is not None:
                self._folded.clear()
                self._steps = OrderedDict(
                    (root, step) for root, step in self._steps.items() if step.table.root != item.manifest.root
                )

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

    def way_to_newest(self, base: int, root: bytes) -> Way | None:
        """How that base becomes the newest object; None where a snapshot is the better way."""
        with self._lock:
            newest, chain = self._objects.get(self._newest_version()), self._chain(base, root)
            if newest is None or not chain:
                return None
            folded = self._folded.get(root)
            return Way(newest=newest, steps=chain if folded is None else [folded])

    def keep_folded(self, newest: WeightObject, folded: PatchSet) -> bool:
        """Hold what turns its base into that object at once; False where that is the newest no more."""
        with self._lock:
            if self._objects.get(self._newest_version()) is not newest:
                return False
            self._folded[folded.table.base_root] = folded
            return True

    def find_patches(self, identity: bytes) -> PatchSet | None:
        """The set with that table; None where it is gone."""
        with self._lock:
            for found in (*reversed(self._steps.values()), *self._folded.values()):
                if found.table.identity == identity:
                    return found
            return None

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

    def _chain(self, base: int, root: bytes) -> list[PatchSet]:
        """The steps from that base to the newest version; none where they do not reach, or cannot be folded yet."""
        newest = self._objects.get(self._newest_version())
        if newest is None or newest.manifest.weight_version <= base:
            return []
        chain: list[PatchSet] = []
        at = root
        while at != newest.manifest.root:
            if at not in self._steps:
                return []
            chain.append(self._steps[at])
            at = chain[-1].table.root
        if not chain or chain[0].table.base_version != base:
            return []  # whoever asks may name any version and any root
        can_be_folded = len(chain) == 1 or all(step.is_complete for step in chain)
        return chain if can_be_folded else []

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
