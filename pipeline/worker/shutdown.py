"""How a worker comes to its end: signals, the death of the process that started it, a last guard.

In: SIGTERM, SIGINT, SIGHUP, and the parent's process id. Out: a request to drain, then an order to
stop. The first signal drains, the second stops now; a parent that is gone counts as the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from pipeline.errors import DrainTimeoutError, RollstreamError

PARENT_VARIABLE = "ROLLSTREAM_PARENT_PID"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_EVERY_S = 0.5
# With the parent its Redis may be gone too; there is less to hope for.
_ORPHAN_DRAIN_S = 10.0


class StoppedNowError(RollstreamError):
    """A second signal came. exit_code: 128 + signal, as shells have it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by a second signal ({signal.Signals(number).name})")
        self.exit_code = 128 + number


@contextlib.contextmanager
def signals_as_before() -> Iterator[None]:
    """What happens to signals after the block is what happened before it."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by something else than Python
                signal.signal(number, handler)


def ignore_signals() -> None:
    """For a process that has nothing left to do but exit: an exception would only disturb that."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Shutdown:
    """Listens for the end. drain: called at the first sign, with the reason."""

    def __init__(self, draining: asyncio.Event, drain: Callable[[str], None]) -> None:
        self._draining = draining
        self._drain = drain
        self._stop_now = asyncio.Event()
        self._number = int(signal.SIGTERM)
        self._has_signal = False
        self._parent = expected_parent()
        self._parent_is_gone = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Signal handlers are ours inside the block. A signal that is ignored stays ignored (nohup).

        After the block all are ignored until `signals_as_before` ends: a worker that is leaving leaves.
        """
        loop = asyncio.get_running_loop()
        ours = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in ours:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in ours:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    async def watch_parent(self) -> None:
        """Drains when the process that started this one is gone; returns at once without one."""
        # Looking is enough. PR_SET_PDEATHSIG would be sooner, but fires when the *thread* that
        # started this process ends, and exists on Linux only.
        while self._parent is not None and os.getppid() == self._parent:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(_LOOK_EVERY_S)
        if self._parent is not None:
            self._parent_is_gone = True
            self._drain("the process that started this worker is gone")

    async def until_it_must_end(self, drain_timeout_s: float) -> RollstreamError:
        """Waits for a drain, then for its time-out or a second signal; returns which it was."""
        await self._draining.wait()
        limit_s = min(drain_timeout_s, _ORPHAN_DRAIN_S) if self._parent_is_gone else drain_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._stop_now.wait()
        except TimeoutError:
            return DrainTimeoutError(f"work in flight did not end within {limit_s:g} s (worker.drain_timeout_s)")
        return StoppedNowError(self._number)

    def _on_signal(self, number: int) -> None:
        if self._has_signal:
            self._number = number
            self._stop_now.set()
            return
        self._has_signal = True
        self._drain(f"signal {signal.Signals(number).name}")


class ExitGuard:
    """Ends the process when it cannot end itself: a thread that never returns keeps Python alive."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._others = set(threading.enumerate())
        self.code = 1

    def start(self, after_s: float) -> None:
        """From now on the process has `after_s` to end."""
        if self._timer is None:
            self._timer = threading.Timer(after_s, self._end)
            self._timer.daemon = True
            self._timer.start()

    def finish(self, code: int) -> None:
        """The worker has ended with `code`; the guard stays only if a thread might keep the process."""
        self.code = code
        left = [thread for thread in threading.enumerate() if not thread.daemon and thread not in self._others]
        if self._timer is not None and not left:
            self._timer.cancel()

    def _end(self) -> None:
        try:
            sys.stderr.flush()
        finally:  # whether or not there is room for it
            os._exit(self.code)


def expected_parent() -> int | None:
    """Id of the process whose end is to be this one's; None where none was said."""
    stated = os.environ.get(PARENT_VARIABLE, "")
    return int(stated) if stated.isdigit() else None
