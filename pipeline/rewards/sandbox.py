"""Programs that nobody has read, run for a moment: `run_python`.

In: text of a Python program, its input, and limits. Out: what became of it; nothing that the program does is an
exception here. In namespaces of its own (Linux) it sees no network, no process but its own, no file but Python's
and the system's libraries, and writes only into a folder in memory that goes with it.

What this is not: a boundary against somebody who has a hole of the kernel to use. For that run scorers in a
container or a virtual machine with nothing to steal. Where the kernel gives no namespaces nothing is run at all: such
a program could end every process of its user, and take the machine with a fork bomb.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
_LOOK_S = 0.05
_GRACE_S = 5.0  # for what was killed to be gone
_START_S = 10.0  # that a loaded machine may take for namespaces and Python's start
_MIB = 1024 * 1024


class SandboxError(Exception):
    """There is no sandbox of the kind that was asked for; nothing was run."""


class Verdict(StrEnum):
    """How a program ended. ERROR: by itself, with an exit code other than 0; or with too many processes."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """exit_code: above 128 for a signal. output, errors: what it wrote, cut at the limit. seconds: it took."""

    verdict: Verdict
    exit_code: int
    output: str
    errors: str
    seconds: float


def run_python(
    program: str,
    stdin: str = "",
    *,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    disk_mb: int = 16,
    output_bytes: int = 64 * 1024,
    max_processes: int = 16,
) -> Outcome:
    """Run a program by this Python, with this input, and tell what became of it.

    timeout_s: by the clock, and of the processor. memory_mb: of each process, and of all together. disk_mb: of
    all files. output_bytes: standard output and errors together.
    max_processes: at once, threads counted. Raises SandboxError where it cannot be isolated.
    """
    with tempfile.TemporaryDirectory(prefix="rollstream-sandbox-") as place, tempfile.TemporaryFile() as given:
        given.write(stdin.encode("utf-8", "replace"))
        given.seek(0)
        written = Path(place) / "program"
        written.write_bytes(program.encode("utf-8", "replace"))
        folder = Path(place) / "folder"
        folder.mkdir()
        ready, ready_fd = os.pipe()
        spec = {
            "program": str(written),
            "folder": str(folder),
            "ready_fd": ready_fd,
            "python": sys.executable,
            "is_root": os.geteuid() == 0,
            "visible": _visible(),
            "memory_bytes": memory_mb * _MIB,
            "disk_bytes": disk_mb * _MIB,
            "cpu_s": math.ceil(timeout_s) + 1,
            "num_tasks": max_processes,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(spec)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(ready_fd,),
            env={},
            start_new_session=True,
        )
        os.close(ready_fd)
        run = _Run(process, ready, output_bytes, memory_mb * _MIB, max_processes)
        with contextlib.closing(run):
            return run.outcome(timeout_s)


@functools.cache
def isolation_problem() -> str:
    """Why programs cannot be isolated here; empty where they can."""
    try:
        outcome = run_python("print(1)", timeout_s=30.0)
    except SandboxError as error:
        return str(error)
    return "" if outcome.output == "1\n" else f"a trial ended with {outcome.verdict}: {outcome.errors[-200:]}"


class _Run:
    """One program, from its start to the death of everything that it started. ready: says that it has begun."""

    def __init__(
        self, process: subprocess.Popen[bytes], ready: int, output_bytes: int, memory_bytes: int, max_processes: int
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._ready = process, ready
        self._output_bytes, self._memory_bytes, self._max_processes = output_bytes, memory_bytes, max_processes
        self._written = {process.stdout: bytearray(), process.stderr: bytearray()}
        self._selector = selectors.DefaultSelector()
        for pipe in self._written:
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ)

    def outcome(self, timeout_s: float) -> Outcome:
        """Wait for the end, or make one. Raises SandboxError."""
        if not self._has_begun():
            self._end()
            self._read()
            raise SandboxError(f"programs cannot be isolated here: {self._text(1).strip()[-300:] or 'no answer'}")
        started = time.monotonic()
        verdict = self._watch(started + timeout_s)
        seconds = time.monotonic() - started
        self._end()
        self._read()
        code = self._process.returncode
        code = code if code >= 0 else 128 - code
        if verdict is None:
            verdict = self._verdict_of(code)
        return Outcome(
            verdict=verdict,
            exit_code=code,
            output=self._text(0),
            errors=self._text(1),
            seconds=seconds,
        )

    def close(self) -> None:
        """Free everything."""
        self._end()
        self._selector.close()
        for pipe in self._written:
            pipe.close()
        os.close(self._ready)

    def _has_begun(self) -> bool:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._ready, selectors.EVENT_READ)
            return bool(waiting.select(_START_S)) and os.read(self._ready, 1) == b"1"

    def _watch(self, deadline: float) -> Verdict | None:
        """None: it ended by itself."""
        look_at = 0.0
        while self._process.poll() is None:
            if (now := time.monotonic()) > deadline:
                return Verdict.TIMEOUT
            if now >= look_at:
                look_at = now + _LOOK_S
                if (problem := self._excess()) is not None:
                    return problem
            if self._selector.get_map():
                self._selector.select(min(_LOOK_S, deadline - now))
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(min(_LOOK_S, deadline - now))
            if self._read():
                return Verdict.OUTPUT
        return Verdict.OUTPUT if self._read() else None

    def _read(self) -> bool:
        """Take what is there; whether that is too much. What is beyond the limit is thrown away."""
        for pipe, taken in self._written.items():
            while pipe in self._selector.get_map() and (data := pipe.read(_MIB)) is not None:
                if not data:
                    self._selector.unregister(pipe)
                    break
                taken.extend(data[: self._output_bytes + 1 - len(taken)])
                if len(taken) > self._output_bytes:
                    return True
        return sum(map(len, self._written.values())) > self._output_bytes

    def _excess(self) -> Verdict | None:
        """Of all processes together, which limits of each do not bound."""
        descendants = self._descendants()
        if len(descendants) > self._max_processes + 1:  # the launcher's child is the program itself
            self._written[list(self._written)[1]][:] = f"more than {self._max_processes} processes\n".encode()
            return Verdict.ERROR
        resident = 0
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                resident += process.memory_info().rss
        return Verdict.MEMORY if resident > self._memory_bytes else None

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _end(self) -> None:
        """SIGKILL to all. The first process of a namespace takes all others with it."""
        found = self._descendants()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        psutil.wait_procs(found, _GRACE_S)

    def _verdict_of(self, code: int) -> Verdict:
        if code == 0:
            return Verdict.OK
        if "MemoryError" in self._text(1)[-500:]:
            return Verdict.MEMORY
        return Verdict.TIMEOUT if code == 128 + signal.SIGXCPU else Verdict.ERROR

    def _text(self, which: int) -> str:
        taken = list(self._written.values())[which]
        return bytes(taken[: self._output_bytes]).decode("utf-8", "replace")


def _visible() -> list[str]:
    """The system's libraries and this Python, with what is installed for it."""
    python = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)}
    return [place for place in (*_SYSTEM, *sorted(python)) if os.path.lexists(place)]
