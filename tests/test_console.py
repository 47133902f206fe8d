"""Merged lines of workers: labelled, aligned, coloured on a terminal only."""

from __future__ import annotations

import io
import os
from pathlib import Path

import click
import pytest

from pipeline.cli.console import Console
from pipeline.local.supervisor import WorkerExit


class Terminal(io.StringIO):
    """Text output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def exit_of(name: str, code: int, restart_in_s: float | None = None) -> WorkerExit:
    return WorkerExit(name=name, code=code, seconds=1.25, restart_in_s=restart_in_s)


def test_labels_line_up() -> None:
    out = io.StringIO()
    console = Console(["generator-1", "trainer"], out)
    console.on_line("generator-1", "one")
    console.on_line("trainer", "two")
    console.say("three")
    assert out.getvalue().splitlines() == ["generator-1 | one", "trainer     | two", "rollstream  | three"]


def test_a_terminal_gets_a_colour_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    console = Console(["a", "b"], out)
    console.on_line("a", "x")
    console.on_line("b", "x")
    first, second = out.getvalue().splitlines()
    assert first.replace("a  ", "b  ") != second
    assert click.unstyle(first) == "a          | x"


def test_a_terminal_without_colours_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Console(["a"], out).on_line("a", "x")
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (exit_of("a", 0), "a is done"),
        (exit_of("a", 1, 0.5), "a ended with exit code 1 after 1.2 s, starts again in 0.5 s"),
        (exit_of("a", -9, 2.0), "a was ended by SIGKILL after 1.2 s, starts again in 2 s"),
        (exit_of("a", 2), "a ended with exit code 2 after 1.2 s"),
    ],
)
def test_the_end_of_a_worker_is_told(ended: WorkerExit, said: str) -> None:
    out = io.StringIO()
    Console(["a"], out).on_exit(ended)
    assert out.getvalue() == f"rollstream | {said}\n"


def ended_by(name: str, error: str, code: int, given_up_after: int = 0) -> WorkerExit:
    return WorkerExit(name=name, code=code, seconds=1.0, restart_in_s=None, error=error, given_up_after=given_up_after)


def test_what_a_person_must_mend_is_said_last(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(["a", "b", "c"], io.StringIO())
    console.on_exit(ended_by("a", "no such file", 2))
    console.on_exit(ended_by("b", "", 0))
    console.on_exit(ended_by("c", "no such file", 2))
    assert console.conclude(2) == 2
    assert capsys.readouterr().err == "error: no such file (a, c)\n"
    assert console.conclude(0) == 0
    assert capsys.readouterr().err == ""


def test_a_worker_that_was_given_up_is_named_last_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(["a", "b"], io.StringIO())
    console.on_exit(ended_by("a", "KeyError: 'x'", 1))
    console.on_exit(ended_by("b", "KeyError: 'y'", 1, given_up_after=3))
    assert console.conclude(1) == 1
    assert capsys.readouterr().err == "error: b crashed 3 times: KeyError: 'y'\n"


def test_lines_that_find_no_room_are_counted_and_those_that_do_again_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as out:
        console = Console(["a"], out)
        for _ in range(3):
            console.on_line("a", "x" * 5000)
        with (tmp_path / "log").open("w") as room:
            os.dup2(room.fileno(), out.fileno())
        console.on_line("a", "y")
    assert (tmp_path / "log").read_text().endswith("a          | y\n")
    assert console.conclude(0) == 0
    said = capsys.readouterr().err
    assert said == "warning: up to 3 lines could not be written to the output: No space left on device\n"


def test_a_line_that_the_output_has_no_letters_for_is_written_with_escapes(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as out:
        Console(["a"], out).on_line("a", "déjà vu")
    assert (tmp_path / "log").read_text() == "a          | d\\xe9j\\xe0 vu\n"


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as out:
        console = Console(["a"], out)
        console.on_line("a", "x")
        console.on_line("a", "y")
