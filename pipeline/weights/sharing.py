"""One receiver for all generators of a machine.

In: a publisher, and a folder where processes of one machine and run meet. Out: what a
`WeightSubscriber` gives. Whoever holds the lock in the folder receives, into memory that the others
map; when it ends, however it ends, another one goes on from what it has mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from pipeline.config import WeightSettings
from pipeline.errors import WeightError
from pipeline.logs import get_logger
from pipeline.weights.address_watch import Resolve
from pipeline.weights.host_memory import HostPool, Mapped, map_shared
from pipeline.weights.manifest import Manifest, decode_manifest, encode_manifest
from pipeline.weights.meeting import enter, leave, lock, open_lock
from pipeline.weights.receiver import create_receiver
from pipeline.weights.reception import floor_of
from pipeline.weights.relay import Relay
from pipeline.weights.state import WeightState
from pipeline.weights.subscriber_stats import Phase, SubscriberStats
from pipeline.weights.transfer import Content

_LOOK_S = 0.005  # between looks at what the receiver has; one costs microseconds
_LEAD_EVERY = 50  # looks between two attempts to become the receiver

_SIGN_EVERY_S = 1.0
_LOST_AFTER_S = 10.0  # without a sign of the receiver, or without a way to its memory

CURRENT, LOCK = "current", "receiver.lock"

log = get_logger()


class SharedSubscriber:
    """Has the methods of `WeightSubscriber`. folder: the same for all who share, for nobody else."""

    def __init__(self, settings: WeightSettings, *, resolve: Resolve, folder: Path, relay: Relay | None = None) -> None:
        self._settings = settings
        self._folder = folder
        self._users = enter(folder)
        self._lock = open_lock(folder / LOCK)
        self._subscriber = create_receiver(settings, resolve, make_pool=self._make_pool, relay=relay)
        self._pool = HostPool(0)
        self._receiving: asyncio.Task[None] | None = None
        self._received: Content | None = None  # the newest, by this process
        self._latest: Content | None = None  # that was returned
        self._mapped: Mapped | None = None  # the newest, of another process
        self._seen: tuple[tuple[int, int], int] | None = None  # CURRENT as it was, and its version
        self._unmapped_since: float | None = None
        self._sign: tuple[int, float] | None = None  # of the receiver's life, and since when it was not renewed
        self._is_alone = False
        self._tells = True  # whether the others know of what this one has received
        self._stats = SubscriberStats(phase=Phase.NEIGHBOUR)

    async def next(self, newer_than: int | None) -> WeightState:
        """The newest version above `newer_than` (None: any), verified. Waits as long as it must.

        Cancelling it is safe. What was raised while receiving is raised by the next call.
        """
        floor = floor_of(newer_than)
        looks = 0
        while (content := self._shared_above(floor)) is None:
            if looks % _LEAD_EVERY == 0 and self._receiving is None:
                if self._may_receive():
                    self._is_alone = False  # one and the same receiver serves both, but never at once
                    self._receiving = asyncio.create_task(self._receive())
                elif not self._is_alone and self._is_neighbour_lost():
                    log.warning("weights_received_alone", folder=str(self._folder))
                    self._is_alone = True
            if self._is_alone:
                content = await self._subscriber.next_content(newer_than)
                break
            if self._receiving is not None and self._receiving.done():
                failed, self._receiving = self._receiving, None
                failed.result()
            looks += 1
            await asyncio.sleep(_LOOK_S)
        self._count(content)
        self._latest = content
        return content.state()

    @property
    def is_receiving(self) -> bool:
        """Whether this process receives by itself, for all of them or alone."""
        return self._receiving is not None or self._is_alone

    @property
    def stats(self) -> SubscriberStats:
        """Figures of this process: what it has received, and what it has been given."""
        mine, given = self._subscriber.stats, self._stats
        return replace(
            mine,
            phase=mine.phase if self.is_receiving else Phase.NEIGHBOUR,
            num_versions=given.num_versions,
            num_skipped=given.num_skipped,
            num_bytes=given.num_bytes,
            num_mapped=given.num_mapped,
        )

    def close(self) -> None:
        """Stop receiving, for another one to go on. Safe to call twice."""
        if self._lock < 0:
            return
        receiving, self._receiving = self._receiving, None
        os.close(self._lock)
        self._lock = -1
        self._latest = self._received = self._mapped = None
        leave(self._folder, self._users)
        if receiving is None or receiving.done():
            self._subscriber.close()
        else:
            receiving.add_done_callback(lambda _: self._subscriber.close())
            receiving.cancel()

    async def __aenter__(self) -> SharedSubscriber:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        receiving = self._receiving
        self.close()
        if receiving is not None:
            await asyncio.wait([receiving])
            await asyncio.sleep(0)

    # The receiver

    def _may_receive(self) -> bool:
        if not lock(self._lock, fcntl.LOCK_EX):
            return False
        os.utime(self._lock)
        return True

    def _make_pool(self, num_bytes: int) -> HostPool:
        self._pool = HostPool(num_bytes)
        return self._pool

    async def _receive(self) -> None:
        """Receive and share every version, for as long as this process lives."""
        sign = asyncio.create_task(self._give_signs_of_life())
        try:
            version = None
            if self._latest is not None:
                self._subscriber.start_from(self._latest)
                version = self._latest.manifest.weight_version
                if self._mapped is not None and self._mapped.buffer is self._latest.buffer:
                    self._tell(self._latest.manifest, self._mapped.place)  # it was found through who is gone
            while True:
                content = await self._subscriber.next_content(version)
                version = content.manifest.weight_version
                self._share(content)
                self._received, self._mapped = content, None
        finally:
            sign.cancel()
            if self._lock >= 0:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    async def _give_signs_of_life(self) -> None:
        while True:
            if self._tells:
                os.utime(self._lock)
            await asyncio.sleep(_SIGN_EVERY_S)

    def _share(self, content: Content) -> None:
        self._tell(content.manifest, self._pool.share(content.buffer))

    def _tell(self, manifest: Manifest, place: Mapping[str, Any]) -> None:
        """Of this version that it lies there."""
        _, payload = encode_manifest(manifest)
        told = msgpack.packb({"manifest": payload, **place})
        aside = self._folder / f"{CURRENT}.{os.getpid()}"
        try:
            aside.write_bytes(told)
            aside.replace(self._folder / CURRENT)
            self._tells = True
        except OSError as error:
            self._tells = False  # without signs of life the others receive for themselves
            log.warning(
                "weights_not_shared",
                weight_version=manifest.weight_version,
                reason=f"{type(error).__name__}: {error}",
                effect="generators of this machine receive for themselves",
                way_out=f"make room in {self._folder.parent}, or let TMPDIR name another folder",
            )
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    # All of them

    def _shared_above(self, floor: int) -> Content | None:
        """What the receiver shares, if it is above `floor` and can be mapped."""
        if self._received is not None and self._received.manifest.weight_version > floor:
            return self._received
        state = self._state_of_current()
        if state is None or (self._seen is not None and self._seen[0] == state and self._seen[1] <= floor):
            return None
        told = self._read_current()
        if told is None:
            return None
        fields, manifest = told
        self._seen = (state, manifest.weight_version)
        if manifest.weight_version <= floor:
            return None
        mapped = map_shared(fields, manifest.num_bytes)
        # Between the look and the lock the buffer may have been written again, which CURRENT then tells.
        if mapped is None or self._state_of_current() != state:
            self._unmapped_since = self._unmapped_since or time.monotonic()
            return None
        self._unmapped_since, self._mapped = None, mapped
        return Content(manifest, mapped.buffer)

    def _read_current(self) -> tuple[dict[str, Any], Manifest] | None:
        """What CURRENT says; None where it has just gone, or cannot be read: that may pass, or be how it stays."""
        try:
            fields = msgpack.unpackb((self._folder / CURRENT).read_bytes())
            return fields, decode_manifest(fields["manifest"], max_model_bytes=self._settings.max_model_bytes)
        except FileNotFoundError:
            return None
        except (OSError, WeightError, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            if self._unmapped_since is None:
                log.warning("shared_weights_unreadable", path=str(self._folder / CURRENT), reason=str(error))
            self._unmapped_since = self._unmapped_since or time.monotonic()
            return None

    def _state_of_current(self) -> tuple[int, int] | None:
        """Differs whenever something else is shared."""
        try:
            found = (self._folder / CURRENT).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _is_neighbour_lost(self) -> bool:
        """Whether the receiver stands still, or its memory cannot be reached from here.

        Signs of life are seen to change; when they were made goes by a clock that may be set meanwhile.
        """
        sign, now = os.fstat(self._lock).st_mtime_ns, time.monotonic()
        if self._sign is None or self._sign[0] != sign:
            self._sign = (sign, now)
        silent_s = now - self._sign[1]
        unmapped_s = 0.0 if self._unmapped_since is None else time.monotonic() - self._unmapped_since
        return max(silent_s, unmapped_s) > _LOST_AFTER_S

    def _count(self, content: Content) -> None:
        self._stats.arrived(content.manifest, is_patched=False, num_received_bytes=0, receive_s=0.0, verify_s=0.0)
        self._stats.num_mapped += not self.is_receiving
