"""What a command does where its output cannot be written: it says so in one line, and keeps what it has done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.records.recorder import read_metrics
from pipeline.weights.security import read_keys

ROOT = Path(__file__).parents[1]
UP = (
    "up",
    "--no-exporter",
    "--set=generation.engine='scripted'",
    "--set=generation.group_size=2",
    "--set=trainer.groups_per_step=2",
    "--set=trainer.max_steps=3",
    "--set=scoring.num_processes=1",
    "--set=scoring.rewards=[{function='length'}]",
)


def rollstream(words: Sequence[str], directory: Path, redirection: str) -> subprocess.CompletedProcess[str]:
    """One command in a directory. redirection: as a shell takes it."""
    environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    command = [sys.executable, "-m", "pipeline.cli", *words]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        cwd=directory,
        env={**environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.parametrize("words", [("config", "show", "--reference"), ("--help",)])
def test_an_answer_that_finds_no_room_is_one_line_on_stderr(words: Sequence[str], tmp_path: Path) -> None:
    answer = rollstream(words, tmp_path, "> /dev/full")
    assert (answer.returncode, answer.stderr) == (
        1,
        "error: what this command has to say cannot be written: No space left on device\n",
    )


def test_a_new_key_whose_use_cannot_be_said_is_written_and_said_to_be(tmp_path: Path) -> None:
    answer = rollstream(("keys", "new", "weights.key"), tmp_path, "> /dev/full")
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: weights.key is written and is a new key; ")
    file = str(tmp_path / "weights.key")
    assert read_keys(file, file).public
    assert len(answer.stderr.splitlines()) == 1


def test_a_complaint_that_finds_no_room_leaves_the_exit_code_as_it_is(tmp_path: Path) -> None:
    assert rollstream(("config", "nonsense"), tmp_path, "2> /dev/full").returncode == 2
    assert rollstream(("config", "nonsense"), tmp_path, "2>&-").returncode == 2


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("> /dev/full", "lines could not be written to the output: No space left on device"),
        ("> /dev/full 2>&1", ""),
        (">&-", ""),
    ],
)
def test_an_up_whose_output_finds_no_room_trains_to_the_end(redirection: str, said: str, tmp_path: Path) -> None:
    answer = rollstream(UP, tmp_path, redirection)
    assert answer.returncode == 0, answer.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "runs" / "default") if "reward_mean" in row] == [1, 2, 3]
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "Exception ignored" not in answer.stderr
