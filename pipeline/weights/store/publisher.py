"""Publishing weights into files: one copy, and the caller goes on.

In: weight states under ever higher versions. Out: files in a folder of the run, written by a thread of
its own. What fails is tried again with the newest version; what was readable stays so.
"""

from __future__ import annotations

import errno
import threading
import time
import uuid
from dataclasses import replace
from types import TracebackType

from pipeline.config import WeightSettings
from pipeline.errors import ServiceUnavailableError, WeightError
from pipeline.logs import get_logger
from pipeline.weights.codec import Encoder, WeightObject
from pipeline.weights.manifest import Manifest, check_newer
from pipeline.weights.protocol import NOTHING
from pipeline.weights.publisher import PublisherStats
from pipeline.weights.state import Endpoints, WeightState
from pipeline.weights.store.folder import open_folder
from pipeline.weights.store.writer import Writer

FILE_BYTES = 16 * 1024 * 1024
LOOK_EVERY_S = 10.0  # a listing and a small file: a few cents a day in an object store
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0  # between attempts
_LAST_WRITE_S = 20.0  # that `close` leaves for what is being written
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

log = get_logger()


class StorePublisher:
    """`publish` may be called from any thread.

    run: folder below `weights.store`, which no other run may have. file_bytes: of a file, unless one
    tile is larger. look_every_s: while nothing is written, whether what is readable is still there.
    """

    def __init__(
        self, settings: WeightSettings, *, run: str, file_bytes: int = FILE_BYTES, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        session = uuid.uuid4()
        self._settings = settings
        self._run = run
        self._session = session.hex
        self._look_every_s = max(look_every_s, settings.poll_s)
        self._problem = ""  # of the last look
        self._encoder = Encoder(session=session.bytes, tile_bytes=settings.tile_bytes)
        self._writer = Writer(
            open_folder(settings.store, run),
            self._encoder,
            session=session.bytes,
            file_bytes=file_bytes,
            grace_s=settings.store_grace_s,
            makes_patches=settings.encoding != "snapshot",
        )
        self._publishing = threading.Lock()
        self._changed = threading.Condition()  # guards the three below
        self._pending: WeightObject | None = None
        self._closing_at: float | None = None
        self._newest = NOTHING
        self._thread: threading.Thread | None = None
        self._num_versions = 0
        self._num_failures = 0
        self._num_put_back = 0
        self._publish_s = 0.0

    def start(self) -> Endpoints:
        """Go on with what is in the store. Raises ServiceUnavailableError, and WeightError as `publish` does."""
        assert self._thread is None, "started twice"
        try:
            there = self._writer.take_over()
        except OSError as error:
            raise ServiceUnavailableError(
                f"weights.store = {self._settings.store!r} cannot be used: {type(error).__name__}: {error}; it must "
                "be there, and open to reading, writing and deleting"
            ) from error
        with self._changed:
            if self._pending is not None:
                check_newer(self._newest, there)
            self._newest = max(self._newest, there)
        self._thread = threading.Thread(target=self._run_writer, name="weight-store", daemon=True)
        self._thread.start()
        return Endpoints(announce="", tiles="", session=self._session, folder=self._run)

    def publish(self, state: WeightState) -> Manifest:
        """Copy `state` to host memory and have it written; returns without waiting for the store.

        The caller may change its tensors as soon as this returns. Raises WeightError: a version
        that is not higher than the last, or tensors that contradict their dtype and shape.
        """
        with self._publishing:
            started = time.perf_counter()
            if self._thread is not None and not self._thread.is_alive():
                raise WeightError("the thread that writes weights has ended; nobody would receive this version")
            check_newer(state.weight_version, self._newest)
            item = self._encoder.encode(state)
            with self._changed:
                self._pending, self._newest = item, state.weight_version
                self._changed.notify_all()
            self._num_versions += 1
            self._publish_s += time.perf_counter() - started
        return item.manifest

    @property
    def is_serving(self) -> bool:
        """Whether the thread that writes is there."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def newest(self) -> int:
        """The last version that was published, here or by a publisher before; NOTHING without one."""
        return self._newest

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being written, nor waits for it."""
        return self._pending is None

    @property
    def stats(self) -> PublisherStats:
        """Figures since the start."""
        return PublisherStats(
            num_versions=self._num_versions,
            num_held=int(self._pending is not None) + int(self._writer.holds_newest),
            num_receivers=0,
            publish_s=self._publish_s,
            encode_s=self._publish_s,
            server=replace(self._writer.stats),
            num_failures=self._num_failures,
            num_put_back=self._num_put_back,
        )

    def close(self) -> None:
        """Finish what is being written, within limits, and free everything. Safe to call twice."""
        with self._publishing:
            if self._closing_at is not None:
                return
            with self._changed:
                self._closing_at = time.monotonic()
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join(_LAST_WRITE_S + 5.0)
                if self._thread.is_alive():
                    log.error("weight_store_hangs", store=self._settings.store)
            self._writer.close()
            self._encoder.close()

    def __enter__(self) -> StorePublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # In the thread

    def _run_writer(self) -> None:
        """Write what is pending, until `close`; the newest when there are several."""
        wait_s: float | None = _FIRST_WAIT_S
        while wait_s is not None:
            wait_s = self._write_next(wait_s)

    def _write_next(self, wait_s: float) -> float | None:
        """Write one version, or wait to try again. Returns how long to wait next time; None at the end."""
        item = self._next_item()
        if item is None:
            return None
        is_last = self._closing_at is not None
        if self._is_settled(item, is_last=is_last, wait_s=wait_s):
            with self._changed:
                self._pending = None if self._pending is item else self._pending
            return _FIRST_WAIT_S
        with self._changed:
            self._changed.wait_for(lambda: self._closing_at is not None, wait_s)
        return None if is_last else min(2 * wait_s, _LONGEST_WAIT_S)

    def _next_item(self) -> WeightObject | None:
        """The newest version; None when there will be none. Meanwhile what is readable is looked after."""
        look_at = time.monotonic() + self._look_every_s
        while True:
            look_in_s = max(0.0, look_at - time.monotonic())
            sweep_in_s = self._writer.sweep_in_s
            with self._changed:
                self._changed.wait_for(
                    lambda: self._pending is not None or self._closing_at is not None,
                    look_in_s if sweep_in_s is None else min(look_in_s, sweep_in_s),
                )
                if self._pending is not None or self._closing_at is not None:
                    return self._pending
            if time.monotonic() >= look_at:
                self._mend()
                look_at = time.monotonic() + self._look_every_s
            if self._writer.sweep_in_s == 0:
                self._sweep()

    def _mend(self) -> None:
        """What is readable has been removed or changed, by somebody who cleaned up or a disk that rots: put it back."""
        version = self._newest
        try:
            lost = self._writer.mend(self._check_time)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                log.warning("weights_not_looked_after", weight_version=version, reason=problem)
            self._problem = problem
            return
        self._problem = ""
        self._num_put_back += len(lost)
        if lost:
            log.warning(
                "weights_put_back",
                weight_version=version,
                num_files=len(lost),
                first=lost[0],
                reason="they were removed, cut off or changed",
                way_out=f"leave {self._run} in weights.store = {self._settings.store!r} alone until the run has "
                "ended; if nobody touched it, mistrust its disk",
            )

    def _is_settled(self, item: WeightObject, *, is_last: bool, wait_s: float) -> bool:
        """Write it. False: it could not be written, and may be later."""
        version, started = item.manifest.weight_version, time.perf_counter()
        try:
            self._writer.write(item, self._check_time)
        except OSError as error:
            self._num_failures += 1
            told = {"weight_version": version, "reason": f"{type(error).__name__}: {error}"}
            if is_last:
                log.error("weights_not_written", **told, effect="readers stay with the version before")
                return False
            log.warning("weights_not_written", **told, again_in_s=wait_s, effect="readers stay with what they have")
            if error.errno in _NO_SPACE:
                self._sweep(make_room=True)
            return False
        except WeightError as error:
            self._num_failures += 1
            log.error("weights_refused", weight_version=version, reason=str(error))
        else:
            log.debug("weights_written", weight_version=version, seconds=round(time.perf_counter() - started, 3))
            self._sweep()
        return True

    def _sweep(self, *, make_room: bool = False) -> None:
        try:
            if make_room:
                self._writer.make_room()
            else:
                self._writer.sweep()
        except OSError as error:
            log.warning("weights_not_removed", reason=f"{type(error).__name__}: {error}")

    def _check_time(self) -> None:
        if self._closing_at is not None and time.monotonic() > self._closing_at + _LAST_WRITE_S:
            raise InterruptedError(errno.EINTR, f"not written within {_LAST_WRITE_S:g} s of the end")
