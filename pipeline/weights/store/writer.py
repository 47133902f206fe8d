"""What a run's folder holds, and how the next version comes into it.

In: weight objects of ever higher versions. Out: files, and last of all the pointer that makes them
the newest version; what no reader needs any more goes. Used by one thread; a call that raises
OSError may be repeated, and what is readable stays so.

    patches from the version before --> tiles, manifest, patches --> pointer --> remove what is older
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from pipeline.errors import WeightError
from pipeline.logs import get_logger
from pipeline.weights.codec import Encoder, WeightObject
from pipeline.weights.manifest import Manifest
from pipeline.weights.patches import PatchSet
from pipeline.weights.protocol import NOTHING
from pipeline.weights.server import ServerStats
from pipeline.weights.store.files import File, patch_files, snapshot_files
from pipeline.weights.store.folder import Folder, is_aside, without_aside
from pipeline.weights.store.pointer import (
    CURRENT,
    MAX_POINTER_BYTES,
    Pointer,
    Step,
    decode_pointer,
    encode_pointer,
    split_name,
    stem,
    version_of,
)
from pipeline.weights.store.upkeep import Upkeep

_WRITES = 4  # files at once: an object store is slow at one, and quick at many
_WORTHWHILE = 0.5  # of a snapshot: patches that weigh more are not kept
_MAX_STEPS = 16
_MAX_OVERTAKEN = 2

log = get_logger()


class Writer:
    """Keeps the newest version whole, two that were overtaken for `grace_s` each, and the last steps.

    One of the two is the version before; the other one stays the same for `grace_s`, however fast
    versions follow. So a reader that always begins with the newest is at last reading the one that stays.
    """

    def __init__(
        self,
        folder: Folder,
        encoder: Encoder,
        *,
        session: bytes,
        file_bytes: int,
        grace_s: float,
        makes_patches: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = ServerStats()
        self._folder = folder
        self._encoder = encoder
        self._session = session
        self._file_bytes = file_bytes
        self._grace_s = grace_s
        self._makes_patches = makes_patches
        self._clock = clock
        self._upkeep = Upkeep(folder)
        self._threads = ThreadPoolExecutor(_WRITES, "weight-files")
        self._pointer: Pointer | None = None
        self._newest: WeightObject | None = None  # whose files can be put back, and from which patches start
        self._overtaken: list[tuple[str, float]] = []  # stems of versions that stay readable, and until when
        self._under_way = ""  # stem of the version that is being written
        self._patches: PatchSet | None = None  # that lead to it
        self._done: set[str] = set()  # its files that are there

    def take_over(self) -> int:
        """Go on where a publisher before left off; returns the newest version, or NOTHING. Raises OSError."""
        self._folder.create()
        stems = [found[0] for name in self._folder.names() if (found := split_name(name))]
        try:
            self._pointer = self._read_pointer()
        except WeightError as error:
            log.warning("weight_pointer_unreadable", reason=str(error), way_out="the next version replaces it")
            return max(map(version_of, stems), default=NOTHING)
        if self._pointer is None:
            self.sweep()
            return NOTHING
        newest = self._pointer.weight_version
        older = {item for item in stems if version_of(item) < newest}
        for item in sorted(older)[-_MAX_OVERTAKEN:]:
            self._protect(item)
        self.sweep()
        return newest

    def write(self, item: WeightObject, check_time: Callable[[], None]) -> None:
        """Make `item` the newest. check_time: raises OSError when writing is to end.

        Raises OSError, and WeightError where another publisher has a version that is as high.
        """
        started = time.monotonic()
        self._folder.create()
        self._begin(item)
        if self._done:
            self._done.intersection_update(self._folder.names())  # somebody may have removed them since
        files = [*patch_files(item, self._patches, self._file_bytes)] if self._patches is not None else []
        files += snapshot_files(item, self._file_bytes)
        self._write_all([file for file in files if file[0] not in self._done], check_time)
        self._refuse_if_taken(item)
        pointer = Pointer(
            session=self._session,
            weight_version=item.manifest.weight_version,
            root=item.manifest.root,
            file_bytes=self._file_bytes,
            steps=self._chain(item.manifest),
        )
        check_time()
        self._folder.write(CURRENT, [encode_pointer(pointer)])
        self.stats.num_announcements += 1
        self.stats.num_transfers += 1
        self.stats.transfer_s += time.monotonic() - started
        if self._pointer is not None:
            self._protect(stem(self._pointer.weight_version, self._pointer.root))
        self._pointer, self._under_way = pointer, ""
        self._newest = item
        self._upkeep.forget()
        self._patches = None
        self._done.clear()

    def mend(self, check_time: Callable[[], None]) -> list[str]:
        """Put back what is gone or changed of the newest version, while nothing is written; returns what it was.

        Nothing where another publisher's version is the newest. Raises OSError; it may be repeated.
        """
        item, pointer = self._newest, self._pointer
        if item is None or pointer is None:
            return []
        there = self._read_pointer_or_none()
        is_ours = there is None or there.session == self._session or there.weight_version < pointer.weight_version
        if not is_ours:
            return []
        lost = self._upkeep.wrong([*snapshot_files(item, self._file_bytes)], self._folder.stamps())
        if there == pointer and not lost:
            return []
        self._folder.create()
        self._write_all(lost, check_time)
        if lost:
            pointer = replace(pointer, steps=())  # whose files are no more likely to be there
        self._folder.write(CURRENT, [encode_pointer(pointer)])
        self._pointer = pointer
        self.stats.num_announcements += 1
        return [name for name, _ in lost] or [CURRENT]

    @property
    def holds_newest(self) -> bool:
        """Whether the newest version is kept in memory."""
        return self._newest is not None

    @property
    def sweep_in_s(self) -> float | None:
        """Seconds until something may go; None where nothing will."""
        return max(0.0, self._overtaken[0][1] - self._clock()) if self._overtaken else None

    def sweep(self) -> None:
        """Remove all files of versions that nobody needs. Raises OSError; it may be repeated."""
        self._expire()
        pointer = self._pointer
        if not self._is_in_charge():
            return  # another publisher's files look like leftovers
        whole = {self._under_way, *(item for item, _ in self._overtaken)}
        steps = {self._under_way}
        if pointer is not None:
            whole.add(stem(pointer.weight_version, pointer.root))
            steps |= {stem(step.weight_version, step.root) for step in pointer.steps}
        stamps = self._folder.stamps()
        self._upkeep.note(stamps)
        for name in stamps:
            found = split_name(without_aside(name))
            is_kept = found is not None and found[0] in (steps if found[1] else whole)
            if is_aside(name) or (found is not None and not is_kept):
                self._folder.remove(name)

    def make_room(self) -> None:
        """There is no space left: versions that were overtaken are the first that can be spared."""
        self._overtaken.clear()
        self.sweep()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _protect(self, item_stem: str) -> None:
        """A version was overtaken. Where there are too many, the first of them stays."""
        self._expire()
        self._overtaken[_MAX_OVERTAKEN - 1 :] = [(item_stem, self._clock() + self._grace_s)]

    def _expire(self) -> None:
        self._overtaken = [(item, until) for item, until in self._overtaken if until > self._clock()]

    def _begin(self, item: WeightObject) -> None:
        """Unless it is the one that was begun: what there is of another one goes."""
        item_stem = stem(item.manifest.weight_version, item.manifest.root)
        if item_stem == self._under_way:
            return
        has_left_something = bool(self._done)
        self._done.clear()
        self._under_way, self._patches = item_stem, None
        if has_left_something:
            self.sweep()
        if not self._makes_patches:
            self._newest = None  # frees it: its files are to be replaced
        if self._newest is not None:
            patches = self._encoder.compare(self._newest, item)
            if patches is not None and patches.num_bytes <= item.manifest.num_bytes * _WORTHWHILE:
                self._patches = patches

    def _write_all(self, files: Sequence[File], check_time: Callable[[], None]) -> None:
        def write(file: File) -> None:
            check_time()
            name, parts = file
            self._folder.write(name, parts)
            self._done.add(name)
            self.stats.num_bytes += sum(map(len, parts))

        futures = [self._threads.submit(write, file) for file in files]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def _is_in_charge(self) -> bool:
        """Whether the pointer is the one that this publisher wrote or found."""
        try:
            return self._read_pointer() == self._pointer
        except WeightError:
            return False

    def _refuse_if_taken(self, item: WeightObject) -> None:
        """A publisher that was thought dead and wakes up must not turn back what its successor has written."""
        there = self._read_pointer_or_none()
        if there is None or there.session == self._session:
            return
        version = item.manifest.weight_version
        if there.weight_version >= version:
            raise WeightError(f"another publisher has written version {there.weight_version}; {version} is dropped")
        if there != self._pointer:
            self._patches = None  # they start from what is not the newest any more

    def _chain(self, manifest: Manifest) -> tuple[Step, ...]:
        """The last steps that weigh less than half a version together."""
        if self._patches is None:
            return ()
        table = self._patches.table
        step = Step(
            base_version=table.base_version,
            base_root=table.base_root,
            weight_version=manifest.weight_version,
            root=table.root,
            num_bytes=self._patches.num_bytes,
        )
        steps = (*(self._pointer.steps if self._pointer else ()), step)[-_MAX_STEPS:]
        while sum(item.num_bytes for item in steps) > manifest.num_bytes * _WORTHWHILE:
            steps = steps[1:]
        return steps

    def _read_pointer_or_none(self) -> Pointer | None:
        """None also where it is garbled."""
        try:
            return self._read_pointer()
        except WeightError:
            return None

    def _read_pointer(self) -> Pointer | None:
        try:
            return decode_pointer(self._folder.read(CURRENT, MAX_POINTER_BYTES + 1))
        except FileNotFoundError:
            return None
