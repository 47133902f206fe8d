"""Worker processes are kept alive, end together, and never stay behind. Real processes throughout."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from pipeline.local.supervisor import RestartPolicy, Supervisor, WorkerExit, WorkerSpec

QUICK = RestartPolicy(first_s=0.01, limit_s=0.05, healthy_after_s=60.0, max_failures=4)
PATIENCE_S = 4.0  # short to wait for, long for a worker that ends at once on a busy machine
FOREVER = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
DRAINS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit(0)))
print('ready', flush=True)
while True:
    time.sleep(0.1)  # a signal that comes just before a sleep is heard after it
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('not listening', flush=True))
print('ready', flush=True)
while True:
    time.sleep(0.1)
"""


class Watch:
    """Collects what a supervisor says, and lets a test wait for a line."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.exits: list[WorkerExit] = []
        self.changed = asyncio.Event()

    def on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self.changed.set()

    def on_exit(self, ended: WorkerExit) -> None:
        self.exits.append(ended)
        self.changed.set()

    def codes(self, name: str) -> list[int]:
        return [ended.code for ended in self.exits if ended.name == name]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(180):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_condition(self, condition: Callable[[], Awaitable[object]]) -> None:
        """Wait for what sets no event."""
        async with asyncio.timeout(180):
            while not await condition():  # noqa: ASYNC110 - Redis sets no event
                await asyncio.sleep(0.02)

    async def until_said(self, line: str, times: int = 1) -> None:
        await self.until(lambda: [said for _, said in self.lines].count(line) >= times)


def script(name: str, code: str, *args: object, ends_run: bool = False) -> WorkerSpec:
    return WorkerSpec(name=name, argv=(sys.executable, "-c", code, *map(str, args)), ends_run=ends_run)


def supervise(watch: Watch, specs: Sequence[WorkerSpec], *, drain_timeout_s: float = 20.0) -> Supervisor:
    return Supervisor(
        specs, drain_timeout_s=drain_timeout_s, on_line=watch.on_line, on_exit=watch.on_exit, restart=QUICK
    )


def runs(pid: int) -> bool:
    """Whether a process is there; one that only waits to be buried is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def ended(pids: Sequence[int]) -> None:
    """Wait until none of these processes runs."""
    async with asyncio.timeout(180):
        while any(runs(pid) for pid in pids):  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.02)


async def test_the_run_is_over_when_the_trainer_is_done_and_the_others_drain(tmp_path: Path) -> None:
    watch = Watch()
    go_on = tmp_path / "go-on"
    trainer = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    specs = [
        script("generator-1", DRAINS),
        script("trainer", trainer, go_on, ends_run=True),
        script("scorer-1", DRAINS),
    ]
    run = asyncio.create_task(supervise(watch, specs).run())
    await watch.until_said("ready", times=2)
    go_on.touch()
    assert await run == 0
    assert watch.codes("trainer") == [0]
    assert {name for name, line in watch.lines if line == "drained"} == {"generator-1", "scorer-1"}
    assert all(ended.restart_in_s is None for ended in watch.exits)


async def test_lines_of_all_workers_are_merged_under_their_names() -> None:
    watch = Watch()
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.stdout.write('no newline')"
    assert await supervise(watch, [script("a", code), script("b", "print('three')")]).run() == 0
    assert {("a", "one"), ("a", "two"), ("a", "no newline"), ("b", "three")} == set(watch.lines)


async def test_a_line_without_an_end_is_cut_and_arrives_whole() -> None:
    watch = Watch()
    code = "import sys; sys.stdout.write('x' * 3_000_000)"
    await supervise(watch, [script("trainer", code, ends_run=True)]).run()
    assert len(watch.lines) > 1
    assert "".join(line for _, line in watch.lines) == "x" * 3_000_000


async def test_a_worker_that_fails_is_started_again_after_growing_pauses(tmp_path: Path) -> None:
    watch = Watch()
    code = """
import pathlib, sys
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + 'x' if tries.exists() else 'x')
sys.exit(0 if len(tries.read_text()) == 3 else 1)
"""
    assert await supervise(watch, [script("trainer", code, tmp_path / "tries", ends_run=True)]).run() == 0
    assert watch.codes("trainer") == [1, 1, 0]
    assert [ended.restart_in_s for ended in watch.exits] == [0.01, 0.02, None]


async def test_a_worker_that_was_killed_is_started_again() -> None:
    watch = Watch()
    supervisor = supervise(watch, [script("scorer-1", DRAINS)])
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready")
    os.kill(supervisor.pids["scorer-1"], signal.SIGKILL)
    await watch.until_said("ready", times=2)
    supervisor.stop()
    assert await run == 0
    assert watch.codes("scorer-1") == [-signal.SIGKILL, 0]


async def test_a_usage_error_stops_everything_with_code_2() -> None:
    watch = Watch()
    wrong = script(
        "scorer-1", "import sys; sys.exit('error: no such reward') if 0 else (print('error: x'), sys.exit(2))"
    )
    assert await supervise(watch, [script("trainer", DRAINS, ends_run=True), wrong]).run() == 2
    assert watch.codes("scorer-1") == [2], "it is not started again"
    assert ("scorer-1", "error: x") in watch.lines


async def test_a_worker_that_always_fails_ends_the_run_with_code_1() -> None:
    watch = Watch()
    assert (
        await supervise(watch, [script("trainer", DRAINS, ends_run=True), script("a", "raise SystemExit(7)")]).run()
        == 1
    )
    assert watch.codes("a") == [7] * QUICK.max_failures


def dies(error: str) -> str:
    """A worker that counts its lives in a file and ends each with this error, `{}` being the number."""
    return f"""
import pathlib, sys
lives = pathlib.Path(sys.argv[1])
lives.write_text(lives.read_text() + 'x' if lives.exists() else 'x')
print({error!r}.format(len(lives.read_text())))
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("error: KeyError: 'step'", "KeyError: 'step'"),
        ("error: ValueError: at 0x7f{0}2 in step {0}", "ValueError: at 0x7f32 in step 3"),
        ("Traceback (most recent call last):\nImportError: no x", "ImportError: no x"),
    ],
)
async def test_a_crash_that_comes_again_and_again_ends_the_run_and_says_why(
    error: str, said: str, tmp_path: Path
) -> None:
    watch = Watch()
    assert await supervise(watch, [script("trainer", dies(error), tmp_path / "lives", ends_run=True)]).run() == 1
    assert watch.codes("trainer") == [1] * QUICK.max_alike
    assert (watch.exits[-1].error, watch.exits[-1].given_up_after) == (said, QUICK.max_alike)


async def test_crashes_that_differ_and_crashes_of_a_run_that_gets_ahead_are_no_reason_to_give_up_early(
    tmp_path: Path,
) -> None:
    watch, moves = Watch(), iter(range(100))
    different = script("trainer", dies("error: {0:*>{0}}"), tmp_path / "a")
    ahead = script("trainer", dies("error: the same"), tmp_path / "b")
    for spec, progress in ((different, lambda _: None), (ahead, lambda _: next(moves))):
        watch.exits.clear()
        supervisor = Supervisor(
            [spec], drain_timeout_s=20, on_line=watch.on_line, on_exit=watch.on_exit, restart=QUICK, progress=progress
        )
        assert await supervisor.run() == 1
        assert watch.codes("trainer") == [1] * QUICK.max_failures


async def test_a_worker_that_leaves_by_itself_stays_away() -> None:
    watch = Watch()
    supervisor = supervise(watch, [script("generator-1", "pass"), script("trainer", DRAINS, ends_run=True)])
    run = asyncio.create_task(supervisor.run())
    await watch.until(lambda: watch.codes("generator-1") == [0])
    await watch.until_said("ready")
    assert set(supervisor.pids) == {"trainer"}
    supervisor.stop()
    assert await run == 0
    assert watch.codes("generator-1") == [0]


async def test_a_worker_can_be_added_to_a_run_and_let_go_of_it() -> None:
    watch = Watch()
    supervisor = supervise(watch, [script("trainer", DRAINS, ends_run=True)])
    supervisor.add(script("too-early", DRAINS))
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready")
    supervisor.add(script("generator-2", DRAINS))
    await watch.until_said("ready", times=2)
    assert supervisor.staying == ["trainer", "generator-2"]
    os.kill(supervisor.pids["generator-2"], signal.SIGKILL)
    await watch.until_said("ready", times=3)
    supervisor.let_go("generator-2")
    assert (supervisor.staying, supervisor.names) == (["trainer"], ["trainer", "generator-2"])
    await watch.until(lambda: watch.codes("generator-2") == [-signal.SIGKILL, 0])
    assert watch.exits[-1].restart_in_s is None
    supervisor.add(script("scorer-2", DRAINS))
    supervisor.let_go("scorer-2")
    supervisor.let_go("nobody")
    supervisor.stop()
    supervisor.add(script("too-late", DRAINS))
    assert await run == 0
    assert {name for name, _ in watch.lines} == {"trainer", "generator-2"}


async def test_a_worker_that_is_let_go_and_stays_is_killed_and_one_that_fails_on_its_way_out_ends_nothing() -> None:
    watch = Watch()
    fails = DRAINS.replace("sys.exit(0)", "sys.exit(2)")
    specs = [script("trainer", DRAINS, ends_run=True), script("a", DEAF), script("b", fails)]
    supervisor = supervise(watch, specs, drain_timeout_s=PATIENCE_S)
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready", times=3)
    for name in "ab":
        supervisor.let_go(name)
    await watch.until(lambda: (watch.codes("a"), watch.codes("b")) == ([-signal.SIGKILL], [2]))
    assert list(supervisor.pids) == ["trainer"]
    supervisor.stop()
    assert await run == 0


async def test_a_worker_that_does_not_drain_is_killed_and_the_code_says_so() -> None:
    watch = Watch()
    supervisor = supervise(watch, [script("a", DEAF), script("b", DRAINS)], drain_timeout_s=PATIENCE_S)
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready", times=2)
    supervisor.stop()
    assert await run == 4
    assert (watch.codes("a"), watch.codes("b")) == ([-signal.SIGKILL], [0])


async def test_a_second_request_ends_all_at_once() -> None:
    watch = Watch()
    supervisor = supervise(watch, [script("a", DEAF)], drain_timeout_s=600)
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready")
    supervisor.stop()
    await watch.until_said("not listening")
    supervisor.stop()
    assert await run == 4


async def test_what_a_worker_has_started_ends_with_it() -> None:
    watch = Watch()
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])
print(child.pid, flush=True)
child.wait()
"""
    supervisor = supervise(watch, [script("a", code)])
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready")
    grandchild = next(int(line) for _, line in watch.lines if line.isdigit())
    supervisor.stop()
    await run
    await ended([grandchild])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_a_worker_has_started_may_tidy_up_after_it(tmp_path: Path, number: signal.Signals) -> None:
    watch = Watch()
    tidies_up = f"echo ready; cat; {sys.executable} -c pass; touch {tmp_path / 'tidy'}"
    code = f"import subprocess; subprocess.Popen(['/bin/sh', '-c', {tidies_up!r}], stdin=subprocess.PIPE).wait()"
    supervisor = supervise(watch, [script("a", code)])
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready")
    (pid,) = supervisor.pids.values()
    if number is signal.SIGKILL:
        os.kill(pid, number)
        await watch.until(lambda: bool(watch.exits))
    supervisor.stop()
    await run
    assert (tmp_path / "tidy").exists()


async def test_a_cancelled_supervisor_leaves_nothing_behind() -> None:
    watch = Watch()
    supervisor = supervise(watch, [script("a", DEAF), script("b", DEAF)])
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready", times=2)
    pids = list(supervisor.pids.values())
    run.cancel()
    await asyncio.wait([run])
    assert run.cancelled()
    await ended(pids)


async def test_a_line_that_cannot_be_passed_on_ends_the_run_and_its_workers() -> None:
    pids: list[int] = []

    def fail(_name: str, _line: str) -> None:
        pids.extend(supervisor.pids.values())
        raise OSError("no space left")

    supervisor = Supervisor([script("a", DRAINS), script("b", FOREVER)], drain_timeout_s=20, on_line=fail)
    with pytest.raises(ExceptionGroup) as caught:
        await supervisor.run()
    assert caught.group_contains(OSError, match="no space left")
    await ended(pids)


async def test_workers_that_all_fail_at_once_are_all_waited_for() -> None:
    pids: set[int] = set()

    def fail(_name: str, _line: str) -> None:
        pids.update(supervisor.pids.values())
        raise OSError("no space left")

    argv = ("/bin/sh", "-c", "while :; do echo x; done")
    specs = [WorkerSpec(name=str(number), argv=argv) for number in range(20)]
    supervisor = Supervisor(specs, drain_timeout_s=20, on_line=fail)
    with pytest.raises(ExceptionGroup):
        await supervisor.run()
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "not even as a zombie"


async def test_workers_know_their_parent_and_not_what_was_taken_from_them() -> None:
    watch = Watch()
    spec = WorkerSpec(
        name="trainer",
        argv=(sys.executable, "-c", "import os; print(os.environ['ROLLSTREAM_PARENT_PID'], 'HOME' in os.environ)"),
        unset=("HOME",),
        ends_run=True,
    )
    await supervise(watch, [spec]).run()
    assert watch.lines == [("trainer", f"{os.getpid()} False")]


def test_a_signal_drains_the_workers_of_a_supervisor_process() -> None:
    process = supervisor_process()
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0
    assert "drained" in output


def supervisor_process() -> subprocess.Popen[str]:
    """A process of its own that supervises one worker, once that is ready."""
    code = """
import asyncio, sys
from tests.test_supervisor import DRAINS, script
from pipeline.local.supervisor import Supervisor
say = lambda name, line: print(line, flush=True)
sys.exit(asyncio.run(Supervisor([script('a', DRAINS)], drain_timeout_s=20, on_line=say).run()))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    )
    assert process.stdout is not None
    deadline = time.monotonic() + 180
    while process.stdout.readline().strip() != "ready":
        assert time.monotonic() < deadline
    return process
