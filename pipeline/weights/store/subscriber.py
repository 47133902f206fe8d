"""Receiving weights from files: the newest verified version, however long that takes.

In: a folder in which files may be late, gone, cut off or wrong. Out: weight states of ever higher
versions. It never returns a state of which one byte is unproved, never gives up, and writes nothing.

    resolve --> pointer --> manifest --> files, several at a time --> state
       ^           |  not newer: look again after `poll_s`  |
       +-- moved --+<--- gone or wrong (what has come is kept while it is the newest)
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace

from pipeline.config import WeightSettings
from pipeline.errors import WeightError
from pipeline.logs import get_logger
from pipeline.weights.address_watch import LOOK_EVERY_S, MovedError, Resolve, unless_moved
from pipeline.weights.manifest import Manifest, decode_manifest
from pipeline.weights.memory import BufferPool, Pool
from pipeline.weights.patches import decode_table
from pipeline.weights.protocol import MAX_MANIFEST_BYTES
from pipeline.weights.reception import Reception, floor_of
from pipeline.weights.state import Endpoints
from pipeline.weights.store.folder import Folder, check_store, open_folder
from pipeline.weights.store.intake import (
    FileReader,
    Intake,
    ParcelTransfer,
    PatchIntake,
    SnapshotIntake,
    StepFiles,
)
from pipeline.weights.store.pointer import (
    CURRENT,
    MAX_POINTER_BYTES,
    Pointer,
    decode_pointer,
    manifest_name,
    parcel_pieces,
    table_name,
    tile_pieces,
)
from pipeline.weights.subscriber_stats import Phase, SubscriberStats
from pipeline.weights.transfer import Content

_LONGEST_WAIT_S = 30.0  # for a store that cannot be read, unless `poll_s` is longer
_PATIENCE = 4  # such attempts in a row, before another way is taken and what has come is let go
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

log = get_logger()


class StoreSubscriber(Reception):
    """One reader of weights, in one event loop. `next` is not to be called twice at a time.

    resolve: which folder the run's weights lie in; None while nobody has said so. What it raises
    passes through `next` as long as no folder is known.
    """

    def __init__(
        self, settings: WeightSettings, *, resolve: Resolve, make_pool: Callable[[int], Pool] = BufferPool
    ) -> None:
        super().__init__(settings, make_pool)
        check_store(settings.store)
        self._resolve = resolve
        self._reader = FileReader(self._throttle)
        self._endpoints: Endpoints | None = None
        self._folder: Folder | None = None
        self._intake: Intake | None = None
        self._not_by_patches = b""  # root of a version whose patches were of no use
        self._num_unread = 0  # attempts in a row in which the store could not be read
        self._problem = ""
        self._has_pointer = False  # whether it was there at the last look

    async def next_content(self, newer_than: int | None) -> Content:
        """The same as it lies in memory."""
        floor = floor_of(newer_than)
        while True:
            endpoints, folder = await self._located()
            try:
                return await unless_moved(self._received(folder, floor), endpoints, self._resolve)
            except MovedError:
                self._stats.num_moves += 1
                self._stats.num_resumed_tiles += self._intake.num_verified if self._intake else 0
                self._endpoints = None

    @property
    def stats(self) -> SubscriberStats:
        """A copy of the figures."""
        return replace(self._stats)

    def close(self) -> None:
        """Free everything, after `next` has returned or was cancelled. Safe to call twice."""
        self._end_warming()
        self._intake = self._held = None
        self._reader.close()

    async def _located(self) -> tuple[Endpoints, Folder]:
        """Where the weights lie, once somebody says so."""
        while self._endpoints is None or self._folder is None:
            self._stats.phase = Phase.ADDRESS
            endpoints = await self._resolve()
            if endpoints is None or not _FOLDER_NAME.fullmatch(endpoints.folder):
                await asyncio.sleep(min(self._settings.poll_s, LOOK_EVERY_S))
                continue
            self._endpoints = endpoints
            self._folder = open_folder(self._settings.store, endpoints.folder)
            self._has_pointer = False
        return self._endpoints, self._folder

    async def _received(self, folder: Folder, floor: int) -> Content:
        """A version above `floor`, complete."""
        while True:
            problem = ""
            try:
                if self._intake is None or self._intake.manifest.weight_version <= floor:
                    self._intake = None  # frees its buffer before the next is made
                    self._intake = await self._begun(folder, floor)
                content = await self._tried(folder, self._intake)
                if content is not None:
                    return self._finished(self._intake, content)
            except FileNotFoundError as error:
                self._stats.num_lost_tiles += 1
                problem = f"{error.filename or error} is not there"
            except OSError as error:
                self._stats.phase = Phase.STORE
                self._stats.num_lost_tiles += 1
                problem = f"{type(error).__name__}: {error}"
            except WeightError as error:
                self._stats.num_refused += 1
                problem = str(error)
                if self._intake is not None and self._intake.is_patched:
                    self._held = None  # whatever is wrong, it is not wrong in a snapshot
            await self._recover(folder, problem)

    async def _tried(self, folder: Folder, intake: Intake) -> Content | None:
        self._stats.phase = Phase.TILES
        started = time.perf_counter()
        try:
            return await intake.fetched(self._reader, folder)
        finally:
            self._receive_s += time.perf_counter() - started
            self._stats.num_corrupt_tiles += intake.num_wrong

    async def _recover(self, folder: Folder, problem: str) -> None:
        """After a failure: wait, or go on at once where there is another way."""
        intake = self._intake
        problem = problem or f"{intake.num_wrong if intake else 0} pieces were wrong"
        if problem != self._problem:
            log.warning("weights_not_read", reason=problem, waiting_for=str(self._stats.phase))
        self._problem = problem
        self._num_unread = self._num_unread + 1 if self._stats.phase is Phase.STORE else 0
        is_worth_keeping = 0 < self._num_unread <= _PATIENCE
        if intake is not None and not is_worth_keeping:
            if intake.is_patched:
                self._not_by_patches, self._intake = intake.manifest.root, None
                return
            if await self._is_overtaken(folder, intake):
                self._intake = None
                return
        wait_s = self._settings.poll_s * 2 ** min(self._num_unread, 16)
        await asyncio.sleep(max(self._settings.poll_s, min(wait_s, _LONGEST_WAIT_S)))

    async def _is_overtaken(self, folder: Folder, intake: Intake) -> bool:
        """Whether the newest version is another one by now. False where that cannot be found out."""
        try:
            pointer = await self._pointer(folder)
        except (OSError, WeightError):
            return False
        return pointer is not None and pointer.weight_version > intake.manifest.weight_version

    async def _pointer(self, folder: Folder) -> Pointer | None:
        """The newest version; None before the first. Raises OSError and WeightError."""
        try:
            payload = await self._reader.read(folder, CURRENT, MAX_POINTER_BYTES + 1)
        except FileNotFoundError:
            if self._has_pointer:
                log.warning(
                    "weights_gone",
                    reason=f"{CURRENT!r} was there and is not any more, in weights.store = {self._settings.store!r}",
                    way_out="the trainer puts it back; if it does not, see its log, and whether the store is mounted",
                )
            self._has_pointer = False
            return None
        self._has_pointer = True
        return decode_pointer(payload)

    async def _begun(self, folder: Folder, floor: int) -> Intake:
        """The beginning of the newest version, once there is one above `floor`."""
        while (pointer := await self._pointer(folder)) is None or pointer.weight_version <= floor:
            self._stats.phase = Phase.VERSION
            self._num_unread = 0
            await asyncio.sleep(self._settings.poll_s)
        self._receive_s = 0.0
        version, root = pointer.weight_version, pointer.root
        payload = await self._reader.read(folder, manifest_name(version, root), MAX_MANIFEST_BYTES + 1)
        manifest = decode_manifest(payload, max_model_bytes=self._settings.max_model_bytes)
        if (manifest.weight_version, manifest.root) != (version, root):
            raise WeightError(f"the manifest is of version {manifest.weight_version}, not of version {version}")
        patched = await self._begun_by_patches(folder, pointer, manifest, floor)
        return patched or SnapshotIntake(manifest, self._borrow(manifest), tile_pieces(manifest, pointer.file_bytes))

    async def _begun_by_patches(
        self, folder: Folder, pointer: Pointer, manifest: Manifest, floor: int
    ) -> PatchIntake | None:
        """None where there are none from what is held, they are not wanted, or they were of no use."""
        base = self._held
        if base is None or base.manifest.weight_version != floor or not base.manifest.is_laid_out_like(manifest):
            return None
        chain = pointer.chain_from(floor, base.manifest.root)
        if not chain or not self._choice.wants_patches or manifest.root == self._not_by_patches:
            return None
        steps = []
        try:
            for step in chain:
                name = table_name(step.weight_version, step.root)
                payload = await self._reader.read(folder, name, MAX_MANIFEST_BYTES + 1)
                table = decode_table(payload, replace(manifest, root=step.root))
                if (table.base_version, table.base_root) != (step.base_version, step.base_root):
                    raise WeightError(f"{name} is not the table that {CURRENT!r} speaks of")
                pieces = parcel_pieces(step.weight_version, table, pointer.file_bytes)
                steps.append(StepFiles(ParcelTransfer(manifest, table), payload, pieces))
        except (FileNotFoundError, WeightError) as error:
            self._stats.num_refused += 1
            log.warning("weight_patches_refused", weight_version=manifest.weight_version, reason=str(error))
            return None
        return PatchIntake(manifest, self._borrow(manifest), base, steps)

    def _finished(self, intake: Intake, content: Content) -> Content:
        self._intake = None
        self._num_unread, self._problem = 0, ""
        return self._complete(
            content, is_patched=intake.is_patched, num_received_bytes=intake.num_bytes, verify_s=intake.verify_s
        )
