"""Keeps the worker processes of one machine alive until the trainer is done.

In: what to start. Out: their lines, merged and labelled, and one exit code. A worker that fails is
started again after a pause that doubles, unless it fails again and again in the same way; one that
exits with 2 stops everything: a person must mend something. No worker outlives the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.local.child import buried, group_ended, output_of, signal_group
from pipeline.local.crashes import Crashes
from pipeline.worker.shutdown import PARENT_VARIABLE

USAGE = 2
DRAIN_TIMED_OUT = 4
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_RITES_S = 5.0  # after a worker's end, for what it had started to see that and tidy up


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One process. name: as in `generator-1`.

    environ: added to the supervisor's own environment. unset: variables taken away from it.
    ends_run: when it exits with 0 the run is over and the others are drained.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    ends_run: bool = False

    def full_environ(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self.unset}
        return {**inherited, "PYTHONUNBUFFERED": "1", **self.environ, PARENT_VARIABLE: str(os.getpid())}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Pause before a restart: first_s, doubled at each failure in a row up to limit_s.

    A life of healthy_after_s ends a row; max_failures in a row end the run. So do max_alike crashes
    with the same error, however long the lives, when the run did not get ahead between them.
    """

    first_s: float = 0.5
    limit_s: float = 30.0
    healthy_after_s: float = 30.0
    max_failures: int = 8
    max_alike: int = 3

    def pause_s(self, failures: int) -> float:
        return min(self.limit_s, self.first_s * 2.0 ** (failures - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """A process ended after `seconds`. code: negative for a signal. restart_in_s: None when it stays away.

    error: why, in its own words, where it said so. given_up_after: so many failures in a row, 0 otherwise.
    """

    name: str
    code: int
    seconds: float
    restart_in_s: float | None
    error: str = ""
    given_up_after: int = 0


class Supervisor:
    """Runs workers.

    `on_line(name, line)` sees every line, `on_exit(WorkerExit)` every end; `on_drain()` is called
    once, when a signal asks for the end. `progress(name)` gives a value that changes when the run
    gets ahead in a way that a restart of this worker keeps.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        *,
        drain_timeout_s: float,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[WorkerExit], None] = lambda _: None,
        on_drain: Callable[[], None] = lambda: None,
        restart: RestartPolicy | None = None,
        progress: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._specs = tuple(specs)
        self._drain_timeout_s = drain_timeout_s
        self._on_line = on_line
        self._on_exit = on_exit
        self._on_drain = on_drain
        self._restart = restart or RestartPolicy()
        self._progress = progress
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._endings: dict[str, asyncio.Event] = {}
        self._workers: asyncio.TaskGroup | None = None
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._code = 0
        self._is_finished = False

    @property
    def pids(self) -> dict[str, int]:
        """Processes that run now."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def names(self) -> list[str]:
        """Everyone who is kept, or still leaving."""
        return list(self._endings)

    @property
    def staying(self) -> list[str]:
        """Everyone who is kept: who runs, and who is about to be started again."""
        return [name for name, ending in self._endings.items() if not ending.is_set()]

    @property
    def is_stopping(self) -> bool:
        """Whether all workers are being drained."""
        return self._stopping.is_set()

    async def run(self) -> int:
        """Start all and stay until the run is over, is stopped, or cannot go on. Returns the exit code."""
        with self._signals():
            try:
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(self._escalate())
                    async with asyncio.TaskGroup() as self._workers:
                        for spec in self._specs:
                            self._start(spec)
                    watch.cancel()
            finally:
                for pid in self.pids.values():
                    signal_group(pid, signal.SIGKILL)
        return self._code

    def add(self, spec: WorkerSpec) -> None:
        """Keep one more worker, under a name that is free; nothing where the run is about to end."""
        if self._endings and not self._stopping.is_set():
            self._start(spec)

    def let_go(self, name: str) -> None:
        """Drain one worker; it is not started again. It has as long as a drain of all."""
        ending = self._endings.get(name)
        if ending is None or ending.is_set():
            return
        ending.set()
        if name in self._processes:
            self._drain(name)

    def stop(self, code: int = 0) -> None:
        """Drain all workers; a second call ends them at once."""
        if self._stopping.is_set():
            self._killing.set()
            return
        self._code = code
        self._stopping.set()
        for ending in self._endings.values():
            ending.set()

    def _on_signal(self) -> None:
        if not self._stopping.is_set():
            self._on_drain()
        self.stop()

    def _start(self, spec: WorkerSpec) -> None:
        assert self._workers is not None
        assert spec.name not in self._endings
        ending = self._endings[spec.name] = asyncio.Event()
        if self._stopping.is_set():
            ending.set()
        self._workers.create_task(self._keep(spec, ending)).add_done_callback(lambda _: self._endings.pop(spec.name))

    def _drain(self, name: str) -> None:
        pid = self.pids[name]
        signal_group(pid, signal.SIGTERM, leader_only=True)
        asyncio.get_running_loop().call_later(self._drain_timeout_s, self._kill, name, pid)

    def _kill(self, name: str, pid: int) -> None:
        if self.pids.get(name) == pid:
            signal_group(pid, signal.SIGKILL, leader_only=True)

    async def _keep(self, spec: WorkerSpec, ending: asyncio.Event) -> None:
        failures, crashes = 0, Crashes(lambda: self._progress(spec.name))
        while not ending.is_set():
            started = time.monotonic()
            code = await self._run_once(spec, ending, crashes)
            seconds = time.monotonic() - started
            failures = 1 if seconds >= self._restart.healthy_after_s else failures + 1
            given_up_after = 0 if ending.is_set() else self._given_up_after(code, failures, crashes)
            is_let_go = ending.is_set() and not self._stopping.is_set()
            is_final = is_let_go or self._is_final(spec, code, given_up_after > 0)
            pause_s = None if is_final else self._restart.pause_s(failures)
            self._on_exit(
                WorkerExit(
                    name=spec.name,
                    code=code,
                    seconds=seconds,
                    restart_in_s=pause_s,
                    error=crashes.error,
                    given_up_after=given_up_after,
                )
            )
            if pause_s is None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), pause_s)

    def _given_up_after(self, code: int, failures: int, crashes: Crashes) -> int:
        """After how many failures another start is in vain; 0 while it is not."""
        if code in {0, USAGE}:
            return 0
        num_alike = crashes.count() if code > 0 else 0
        if num_alike >= self._restart.max_alike:
            return num_alike
        return failures if failures >= self._restart.max_failures else 0

    def _is_final(self, spec: WorkerSpec, code: int, is_given_up: bool) -> bool:
        """Whether a worker stays away after this exit; ends the run where that follows."""
        if self._stopping.is_set():
            if not self._is_finished and (code == DRAIN_TIMED_OUT or self._killing.is_set()):
                self._code = self._code or DRAIN_TIMED_OUT
            return True
        if code == 0:
            if spec.ends_run:
                self._is_finished = True
                self.stop()
            return True
        if code == USAGE or is_given_up:
            self.stop(USAGE if code == USAGE else 1)
            return True
        return False

    async def _run_once(self, spec: WorkerSpec, ending: asyncio.Event, crashes: Crashes) -> int:
        crashes.begin()

        def on_line(name: str, line: str) -> None:
            crashes.see(line)
            self._on_line(name, line)

        async with output_of(spec.name, on_line) as write_fd:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=asyncio.subprocess.STDOUT,
                env=spec.full_environ(),
                start_new_session=True,
            )
            self._processes[spec.name] = process
            if self._killing.is_set():
                self._kill(spec.name, process.pid)
            elif ending.is_set():
                self._drain(spec.name)
            try:
                return await process.wait()
            finally:
                del self._processes[spec.name]
                try:
                    if process.returncode is not None:
                        await group_ended(process.pid, within_s=_LAST_RITES_S)
                finally:
                    signal_group(process.pid, signal.SIGKILL)
                    await buried(process)

    async def _escalate(self) -> None:
        """SIGTERM when asked to stop; SIGKILL when asked again or when the drain takes too long."""
        await self._stopping.wait()
        for pid in self.pids.values():
            signal_group(pid, signal.SIGTERM, leader_only=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._killing.wait(), self._drain_timeout_s)
        self._killing.set()
        for pid in self.pids.values():
            signal_group(pid, signal.SIGKILL, leader_only=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals are ours inside the block; one that is ignored stays ignored (nohup)."""
        loop = asyncio.get_running_loop()
        ours = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in ours:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in ours:
                loop.remove_signal_handler(number)
