"""Files that are whole or not there."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.disk import write_whole

REWRITES = """
import sys
from pathlib import Path
from pipeline.disk import write_whole
path = Path(sys.argv[1])
for number in range(10**9):
    write_whole(path, str(number % 10) * 100_000)
    if number == 20:
        print("at it", flush=True)
"""


def test_a_file_is_replaced_whole_and_only_its_owner_may_read_it_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "new" / "server.json"
    write_whole(path, "first", mode=0o600)
    write_whole(path, "second", mode=0o600)
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["server.json"]


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with subprocess.Popen([sys.executable, "-c", REWRITES, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"at it\n"
        writer.send_signal(signal.SIGKILL)
    text = path.read_text()
    assert len(text) == 100_000
    assert len(set(text)) == 1


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_whole(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "newer than what there was")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]
