"""Worker processes for tests: real ones, started by a fork of a process that has done the imports.

In: the words of a `rollstream ROLE` command. Out: a process of its own that runs just that, and the
file with its output. A start costs milliseconds instead of a second of imports; everything after
the imports is what the command does. Processes that test at the same time share what they fork from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
# With what those import that have a model, which takes a process four seconds; importing it starts no thread.
_IMPORTED = [
    *("pipeline.cli", "pipeline.settings.files", "pipeline.learner.scripted", "pipeline.engines.scripted"),
    *(f"workers.{role}" for role in ("generator", "scorer", "teacher", "judge", "trainer", "exporter")),
    *("torch", "transformers.models.llama.modeling_llama", "pipeline.engines.transformers", "pipeline.learner.policy"),
]
_SERVER: Any = forkserver._forkserver
_ADDRESS = "FORK_SERVER_OF_TESTS"


@dataclass(eq=False)
class Worker:
    """One process and the file with its output.

    may_fail: it was killed on purpose, or is meant to end with an error.
    """

    role: str
    process: ForkServerProcess
    log: Path
    may_fail: bool = False

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self.process.exitcode

    @property
    def has_crashed(self) -> bool:
        """Whether it has ended with an error that nobody wanted."""
        return not self.may_fail and self.code not in {None, 0}

    @property
    def output(self) -> str:
        """Everything it has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def tail(self) -> str:
        """The end of its output, under its name."""
        return f"--- {self.role} {self.pid}, exit code {self.code}\n{self.output[-1500:]}"

    @property
    def events(self) -> list[dict[str, object]]:
        """Its log, parsed; lines that are not JSON are left out."""
        found = []
        for line in self.output.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [event for event in found if isinstance(event, dict)]

    def events_named(self, name: str) -> list[dict[str, object]]:
        """The events of one name."""
        return [event for event in self.events if event.get("event") == name]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone; one that has just ended hears nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL, on purpose; returns when it is dead."""
        self.may_fail = True
        self.process.kill()
        self.process.join()


def rollstream(words: list[str]) -> int:
    """The command, in this process. Returns its exit code."""
    from pipeline.cli import run

    return run(words)


def start_process(
    words: Sequence[str],
    log: Path,
    *,
    may_fail: bool = False,
    skew_s: float = 0.0,
    program: Callable[[list[str]], int] = rollstream,
) -> Worker:
    """Run `rollstream WORDS`, the first of which is a role or another command, with its output in `log`.

    skew_s: how far its clock is ahead of everyone else's. program: to be run instead of the command, from a module.
    """
    process = forks().Process(target=_be, args=(program, [*words], log, skew_s), daemon=True)
    process.start()
    return Worker(words[0], process, log, may_fail)


def _be(program: Callable[[list[str]], int], words: list[str], log: Path, skew_s: float) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(ROOT)
    if skew_s:
        _skew_clock(skew_s)
    multiprocessing.current_process().daemon = False  # a worker may have processes of its own
    os.environ["ROLLSTREAM_PARENT_PID"] = str(os.getppid())
    sys.exit(program(words))


def _skew_clock(seconds: float) -> None:
    right = time.time
    time.time = lambda: right() + seconds


@functools.cache
def forks() -> ForkServerContext:
    """A process that has imported what workers import, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    if address := os.environ.get(_ADDRESS):
        _use(address)
        return context
    context.set_forkserver_preload(_IMPORTED)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return context


def share_forks() -> None:
    """Start it, for all processes that this one starts; it ends with this one."""
    if not hasattr(_SERVER, "_forkserver_authkey"):  # from Python 3.14 on each has to have one of its own
        forks()
        os.environ[_ADDRESS] = _SERVER._forkserver_address


def _use(address: str) -> None:
    """Fork from what another process has started, and which is not looked after here."""
    _SERVER._forkserver_address = address
    _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    _SERVER.ensure_running = resource_tracker.ensure_running
