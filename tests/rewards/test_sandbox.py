"""Programs that mean harm, and the reward that runs them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.config import RewardSettings
from pipeline.rewards import load_rewards, sandbox
from pipeline.rewards.code import program_of, python_tests
from pipeline.rewards.sandbox import Outcome, SandboxError, Verdict, isolation_problem, run_python

pytestmark = pytest.mark.skipif(bool(isolation_problem()), reason=isolation_problem() or "programs can be isolated")
PATIENT_S = 60.0  # for what ends by itself, on a loaded machine

# So many tries and no more: a bomb without an end would take the machine, should the limit not hold.
FORKS = """
import os, time
num_forked = 0
for _ in range(100):
    try:
        child = os.fork()
    except OSError:
        continue
    if child == 0:
        time.sleep(3600)
    num_forked += 1
print(num_forked)
"""
MARK = f"daemon-{os.getpid()}"
DAEMON = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", {MARK!r}])
    os._exit(0)
os.wait()
"""


def run(program: str, stdin: str = "", **limits: object) -> Outcome:
    return run_python(program, stdin, **({"timeout_s": PATIENT_S} | limits))  # type: ignore[arg-type]


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_a_program_gets_its_input_and_its_output_comes_back() -> None:
    outcome = run("import sys\nprint(input()[::-1])\nprint('ähm', file=sys.stderr)\nsys.exit(3)", "abc")
    assert (outcome.output, outcome.errors, outcome.exit_code) == ("cba\n", "ähm\n", 3)
    assert outcome.verdict is Verdict.ERROR


@pytest.mark.parametrize(
    ("program", "limits", "verdict"),
    [
        ("while True: pass", {"timeout_s": 0.3}, Verdict.TIMEOUT),
        ("import time\ntime.sleep(3600)", {"timeout_s": 0.3}, Verdict.TIMEOUT),
        ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", {"timeout_s": 0.3}, Verdict.TIMEOUT),
        ("everything = bytearray(10**10)", {}, Verdict.MEMORY),
        ("while True: print('x' * 1000)", {}, Verdict.OUTPUT),
        ("import os\nos.write(2, bytes(10**6))", {}, Verdict.OUTPUT),
        ("open('large', 'wb').write(bytes(10**8))", {}, Verdict.ERROR),
        ("def f(", {}, Verdict.ERROR),
        ("\udcff", {}, Verdict.ERROR),
    ],
    ids=["loops", "sleeps", "deaf", "greedy", "talks", "complains", "writes", "no python", "no text"],
)
def test_whatever_a_program_does_is_a_verdict(program: str, limits: dict[str, object], verdict: Verdict) -> None:
    before = descendants()
    outcome = run(program, **limits)
    assert outcome.verdict is verdict, outcome
    assert len(outcome.output) <= 64 * 1024
    assert descendants() <= before


def test_it_sees_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    outcome = run("import os\nprint(sorted(os.environ), 'hunter2' in str(os.environ))")
    assert outcome.output.endswith("False\n")
    assert "SECRET" not in outcome.output


def test_the_kernel_bounds_how_many_processes_there_are_and_none_is_left() -> None:
    before = descendants()
    outcome = run(FORKS, max_processes=8)
    assert (outcome.verdict, outcome.output) == (Verdict.OK, "7\n")
    assert descendants() <= before


def test_memory_of_all_processes_together_is_bounded() -> None:
    program = "import os, time\nfor _ in range(3): os.fork()\nheld = b'x' * (60 << 20)\ntime.sleep(3600)"
    assert run(program, memory_mb=200).verdict is Verdict.MEMORY


@pytest.mark.parametrize("target", ["-1", "os.getppid()", "0", "1"])
def test_no_signal_reaches_a_process_outside(target: str) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run(f"import os\nos.kill({target}, 9)")
        assert bystander.poll() is None
    finally:
        bystander.communicate()
    assert bystander.returncode == 1  # by itself, at the end of its input


def test_what_left_its_group_and_its_parent_ends_with_it() -> None:
    assert run(DAEMON).verdict is Verdict.OK
    assert [words for words in map(words_of, psutil.pids()) if words[-1:] == [MARK]] == []


def words_of(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def test_there_is_no_network_and_no_file_of_ours_and_nothing_of_the_system_can_be_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    program = f"""
import os, socket
def tried(action):
    try:
        return action()
    except OSError as error:
        return type(error).__name__
print(tried(lambda: open({str(secret)!r}).read()))
print(tried(lambda: open("/etc/passwd").read()))
print(tried(lambda: socket.create_connection(("127.0.0.1", 9), 5)))
print(tried(lambda: open("/usr/bin/new", "w")))
print(tried(lambda: os.remove({sys.executable!r})))
print([pid for pid in os.listdir("/proc") if pid.isdigit()], os.getuid() == 0)
"""
    lines = run(program).output.splitlines()
    assert lines[:2] == ["FileNotFoundError", "FileNotFoundError"]
    assert lines[2] == "OSError", "the network is unreachable"
    assert lines[3] == "OSError", "the file system is to be read only"
    assert lines[4] != "None"
    assert lines[5] == "['1'] False"
    assert Path(sys.executable).exists()


def test_where_it_cannot_be_isolated_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "launcher.py"
    broken.write_text("raise SystemExit('unshare: Operation not permitted')")
    monkeypatch.setattr(sandbox, "_LAUNCHER", broken)
    with pytest.raises(SandboxError, match="cannot be isolated here: unshare: Operation not permitted"):
        run_python("print(1)")


def test_no_descriptor_and_no_file_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run("print(1)")
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 1) == 3"]


@pytest.mark.parametrize(
    ("text", "tests", "expected"),
    [
        (ADD, ASSERTS[:2], 1.0),
        (ADD, ASSERTS, 2 / 3),
        (ADD, ASSERTS[0], 1.0),
        ("def add(a, b): return a - b", ASSERTS[:1], 0.0),
        ("import os\nos._exit(0)", ASSERTS[:1], 0.0),
        ("raise SystemExit", ASSERTS[:1], 0.0),
        ("print(int(input()) * 2)", [{"input": "4\n", "output": "8"}, {"input": "5\n", "output": "10 \n\n"}], 1.0),
        ("print(8)", [{"input": "4\n", "output": "8"}, {"input": "5\n", "output": "10"}], 0.5),
        (ADD, None, None),
        (ADD, [], None),
    ],
)
def test_the_share_of_tests_passed_is_the_reward(text: str, tests: object, expected: float | None) -> None:
    found = python_tests([""], [text], tests=[tests], timeout_s=PATIENT_S)
    assert found == [pytest.approx(expected) if expected is not None else None]


def test_all_tests_may_be_asked_for_and_completions_run_at_once() -> None:
    started = time.monotonic()
    found = python_tests(
        [""] * 2,
        [ADD, ADD],
        tests=[ASSERTS, ASSERTS[:1]],
        all_or_nothing=True,
        timeout_s=PATIENT_S,
        allow_unisolated=True,
    )
    assert found == [0.0, 1.0]
    assert time.monotonic() - started < PATIENT_S


def test_the_program_is_the_last_block_also_where_it_was_cut_off() -> None:
    assert program_of("```\nx = 1\n```\nbetter:\n```Python\nx = 2\n```") == "x = 2"
    assert program_of("so:\n```py\nx = 3\ny =") == "x = 3\ny ="
    assert program_of("x = 4") == "x = 4"


def test_it_is_loaded_by_its_name() -> None:
    (reward,) = load_rewards([RewardSettings.model_validate({"function": "python_tests"})])
    assert reward.name == "python_tests"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"timeout_s": -1}, "timeout_s = -1"),
        ({"timeout_s": math.nan}, "timeout_s = nan"),
        ({"timeout_s": "5"}, "timeout_s = '5'"),
        ({"memory_mb": 0}, "memory_mb = 0"),
        ({"memory_mb": "a"}, "memory_mb = 'a'"),
    ],
)
def test_limits_that_make_no_sense_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        python_tests([""], ["print(1)"], tests=[["assert True"]], **wrong)


def test_a_test_without_its_output_is_no_test() -> None:
    with pytest.raises(ValueError, match='no "output"'):
        python_tests([""], ["print(1)"], tests=[[{"input": "1", "expected": "1"}]], timeout_s=PATIENT_S)
