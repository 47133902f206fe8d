"""One child process with the reward functions loaded, seen from the scorer.

In: calls. Out: answers within the time-out, or an error and a process that is dead for certain.

What a reward function has started ends with the child as follows:
- the child is ended here (time-out, cancellation, close): its process group, and every process that
  descends from it at that moment, those in a session of their own (setsid) included;
- the scorer is killed: the child's process group, by the guard;
- the child dies by itself: its process group.
Not found are a program that has left the group and whose parent has ended (a daemon that forked
twice), and any program outside the group where the scorer is killed or the child died by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import psutil

from pipeline.errors import RewardLoadError
from pipeline.rewards import frames

_KEPT_FROM_REWARDS = frozenset({"REDIS_URL", "ROLLSTREAM_REDIS__URL"})
LOAD_TIMEOUT_S: Final = 300.0
_STDERR: Final = 2
_EXIT_S: Final = 0.2


class ProcessDiedError(Exception):
    """The child ended before it answered, or answered something else than it was asked."""


class RewardProcess:
    """A process that answers one call at a time.

    A guard (a shell that waits for the scorer's end of a pipe to close) leads the child's process
    group and kills the whole group when the scorer is gone. It needs no help from the child, which
    may be stuck in C code with the interpreter locked. What it does not reach is said above.
    """

    def __init__(self, order: frames.Frame) -> None:
        """Start the process; `order` names the functions to load. Does not wait for them."""
        read_end, self._life = os.pipe()
        self._guard = _start_guard(read_end)
        ours, theirs = socket.socketpair()
        try:
            self._child = _start_child(theirs, group=self._guard.pid)
        except BaseException:
            ours.close()
            self._end_guard()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._sock = ours
        self._order = order
        self._is_in_call = False
        self._num_calls = 0

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    async def load(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Wait until the functions are loaded. Raises RewardLoadError; the process is dead then."""
        try:
            reply = await self.call(self._order, timeout_s)
        except TimeoutError as error:
            raise RewardLoadError(f"scoring.rewards: importing them took longer than {timeout_s:g} s.") from error
        except ProcessDiedError as error:
            raise RewardLoadError(f"scoring.rewards: importing them ended their process: {error}.") from error
        if "error" in reply:
            self.kill()
            raise RewardLoadError(f"scoring.rewards: {reply['error']}")

    async def call(self, frame: frames.Frame, timeout_s: float) -> frames.Frame:
        """The child's answer. Raises TimeoutError or ProcessDiedError.

        After any exception, cancellation included, the process is dead: whoever answers late or
        twice cannot be trusted with the next call.
        """
        loop = asyncio.get_running_loop()
        self._is_in_call = True
        self._num_calls += 1
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._sock, frames.pack(frame | {"number": self._num_calls}))
                header = await self._receive(frames.HEADER_BYTES)
                reply = frames.unpack(await self._receive(frames.body_length(header)))
            return _answer_to(self._num_calls, reply)
        except TimeoutError:
            self._close()
            raise
        except OSError as error:
            problem = self._how_it_ended()
            self._close()
            raise ProcessDiedError(problem) from error
        except BaseException:
            self._close()
            raise
        finally:
            self._is_in_call = False

    async def _receive(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < num_bytes:
            part = await loop.sock_recv(self._sock, min(num_bytes - len(parts), 1 << 20))
            if not part:
                raise ConnectionResetError("the reward process closed its socket")
            parts += part
        return bytes(parts)

    def _how_it_ended(self) -> str:
        """How the child ended by itself, which it did a moment ago."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=_EXIT_S)
        code = self._child.returncode
        if code is None:
            return "it closed its connection"
        if code >= 0:
            return f"it exited with code {code}"
        hint = ", which the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"it was killed by {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        """End the child, its group and its descendants, now. A call in flight fails. Safe to call twice."""
        descendants = self._descendants()  # once the child is dead, they have another parent
        self._end_guard()
        for descendant in descendants:
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        self._child.wait()
        # The event loop still waits for the socket of a call in flight; that call closes it.
        if not self._is_in_call:
            self._sock.close()

    def _descendants(self) -> list[psutil.Process]:
        if self._child.poll() is not None:
            return []
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._child.pid).children(recursive=True)
        return []

    def _close(self) -> None:
        self._is_in_call = False
        self.kill()

    def _end_guard(self) -> None:
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where all are dead
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
            os.close(self._life)


def _answer_to(number: int, reply: frames.Frame) -> frames.Frame:
    if reply.get("number") != number:
        raise ProcessDiedError(f"it answered call {reply.get('number')} when it was asked call {number}")
    return reply


def _start_guard(read_end: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", "trap '' INT TERM HUP; read _; kill -KILL 0"],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
    finally:
        os.close(read_end)


def _start_child(sock: socket.socket, *, group: int) -> subprocess.Popen[bytes]:
    # -P keeps the working directory from hiding installed modules; the child appends it instead.
    # Reward functions may need keys of their own there; the queues' password is not among what they need.
    inherited = {name: value for name, value in os.environ.items() if name not in _KEPT_FROM_REWARDS}
    environment = inherited | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.Popen(
        [sys.executable, "-u", "-P", "-m", "pipeline.rewards.child", str(sock.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        pass_fds=(sock.fileno(),),
        env=environment,
        process_group=group,
    )


def order_for(functions: Sequence[tuple[str, dict[str, object]]], rows: Sequence[frames.Frame] = ()) -> frames.Frame:
    """What a new process is told first: functions with kwargs, rows to try them on, where else modules are."""
    return {
        "rewards": [{"function": function, "kwargs": kwargs} for function, kwargs in functions],
        "rows": list(rows),
        "path": [os.getcwd()],
    }
