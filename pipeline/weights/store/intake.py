"""One version on its way in from files, whole or as a chain of patches.

In: a folder, a checked manifest, and what the pointer says of patches. Out: its content, once every tile
has proved to be what the manifest says. What is proved is kept when a file is gone, wrong or cannot be read.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.weights.manifest import Manifest
from pipeline.weights.patches import PatchSet, PatchTable, fold
from pipeline.weights.protocol import Kind
from pipeline.weights.store.folder import Folder
from pipeline.weights.store.pointer import Pieces
from pipeline.weights.throttle import Throttle
from pipeline.weights.transfer import Content, PatchTransfer, SnapshotTransfer, Transfer

_READS = 4  # files at once: an object store is slow at one, and quick at many


class FileReader:
    """Reads files of a folder in threads of its own, since a share that hangs must hang nothing else."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._threads = ThreadPoolExecutor(_READS, "weight-files")

    async def read(self, folder: Folder, name: str, limit: int) -> bytes:
        """The first bytes of a file. Raises OSError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, folder.read, name, limit)

    async def fetch(self, folder: Folder, transfer: Transfer, pieces: Pieces) -> int:
        """Read each missing piece once; returns how many were wrong.

        Raises the first OSError, and WeightError as `accept` does. What others brought until then is kept.
        """
        missing = list(iter(transfer.next_missing, None))
        wanted = set(missing)
        files = deque(file for file in range(pieces.num_files) if wanted.intersection(pieces.pieces_of(file)))
        num_wrong = 0

        async def drain() -> None:
            nonlocal num_wrong
            while files:
                file, start = files.popleft(), 0
                await self._throttle.admit(pieces.file_size(file))
                data = memoryview(await self.read(folder, pieces.name(file), pieces.file_size(file)))
                for index in pieces.pieces_of(file):
                    part = data[start : start + pieces.sizes[index]]
                    start += pieces.sizes[index]
                    num_wrong += index in wanted and not await transfer.accept(index, part)

        try:
            ends = await asyncio.gather(*(drain() for _ in range(_READS)), return_exceptions=True)
        finally:
            transfer.put_back(missing)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return num_wrong

    def close(self) -> None:
        """End the threads; one that hangs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Intake(ABC):
    """What is under way. manifest: of the version. num_wrong: pieces that failed verification."""

    is_patched: bool

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.num_wrong = 0

    @property
    @abstractmethod
    def num_verified(self) -> int:
        """Pieces that are there."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that have come and were right."""

    @property
    @abstractmethod
    def verify_s(self) -> float:
        """Seconds spent on hashing, copying and patching."""

    @abstractmethod
    async def fetched(self, reader: FileReader, folder: Folder) -> Content | None:
        """One try. None: some pieces were wrong. Raises OSError, and WeightError as `Transfer.accept` does."""


class SnapshotIntake(Intake):
    """Tile by tile."""

    is_patched = False

    def __init__(self, manifest: Manifest, buffer: memoryview, pieces: Pieces) -> None:
        super().__init__(manifest)
        self._transfer = SnapshotTransfer(manifest, buffer)
        self._pieces = pieces

    @property
    def num_verified(self) -> int:
        return self._transfer.num_verified

    @property
    def num_bytes(self) -> int:
        return self._transfer.num_bytes

    @property
    def verify_s(self) -> float:
        return self._transfer.verify_s

    async def fetched(self, reader: FileReader, folder: Folder) -> Content | None:
        self.num_wrong = await reader.fetch(folder, self._transfer, self._pieces)
        return self._transfer.content() if self._transfer.is_complete else None


class ParcelTransfer(Transfer):
    """The parcels of one step, proved and kept. They are applied when the whole chain is there."""

    request = Kind.GET_PARCEL
    answer = Kind.PARCEL

    def __init__(self, manifest: Manifest, table: PatchTable) -> None:
        filled = [parcel for parcel in range(table.num_parcels) if table.parcel_size(parcel)]
        super().__init__(manifest, memoryview(b""), filled, table.num_parcels)
        self.table = table
        self._parcels = [b""] * table.num_parcels

    def piece_size(self, index: int) -> int:
        """Bytes of a parcel."""
        return self.table.parcel_size(index)

    def has_tile(self, index: int) -> bool:
        """None is there before the chain is applied."""
        return False

    @property
    def key(self) -> bytes:
        """The identity of the table."""
        return self.table.identity

    def patch_set(self, payload: bytes) -> PatchSet:
        """All of it, once it is complete. payload: of the table."""
        assert self.is_complete
        return PatchSet(table=self.table, payload=payload, parcels=tuple(self._parcels))

    def _place(self, index: int, data: memoryview) -> bool:
        is_right = self.table.is_parcel(index, data)
        if is_right:
            self._parcels[index] = bytes(data)
        return is_right


@dataclass(frozen=True, slots=True)
class StepFiles:
    """One step of the chain. payload: of its table."""

    transfer: ParcelTransfer
    payload: bytes
    pieces: Pieces


class PatchIntake(Intake):
    """Step by step, then all at once. base: what the first step starts from."""

    is_patched = True

    def __init__(self, manifest: Manifest, buffer: memoryview, base: Content, steps: Sequence[StepFiles]) -> None:
        super().__init__(manifest)
        self._buffer = buffer
        self._base = base
        self._steps = steps
        self._applied: PatchTransfer | None = None

    @property
    def num_verified(self) -> int:
        return sum(step.transfer.num_verified for step in self._steps)

    @property
    def num_bytes(self) -> int:
        return sum(step.transfer.num_bytes for step in self._steps)

    @property
    def verify_s(self) -> float:
        applied_s = self._applied.verify_s if self._applied else 0.0
        return applied_s + sum(step.transfer.verify_s for step in self._steps)

    async def fetched(self, reader: FileReader, folder: Folder) -> Content | None:
        self.num_wrong = 0
        for step in self._steps:
            if not step.transfer.is_complete:
                self.num_wrong += await reader.fetch(folder, step.transfer, step.pieces)
        if not all(step.transfer.is_complete for step in self._steps):
            return None
        chain = [step.transfer.patch_set(step.payload) for step in self._steps]
        patches = chain[0] if len(chain) == 1 else await asyncio.to_thread(fold, chain, self.manifest)
        return await self._apply(patches)

    async def _apply(self, patches: PatchSet) -> Content:
        self._applied = transfer = PatchTransfer(self.manifest, self._buffer, patches.table, self._base)
        await transfer.place_unchanged()
        while (index := transfer.next_missing()) is not None:
            await transfer.accept(index, memoryview(patches.parcels[index] or b""))
        return transfer.content()
