"""The benchmark of the queue runs, reports in the common shape, and says what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.queue", *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.skipif(shutil.which("redis-benchmark") is None, reason="redis-benchmark is not installed")
def test_the_last_line_is_one_object_with_the_ratios() -> None:
    done = run("--json", "--rounds", "1", "--groups", "512", "--batch", "64", path=os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "queue"
    assert report["results"]["hop_vs_redis_benchmark"] > 0
    assert report["results"]["hop_vs_xadd_xread1"] > 0
    assert report["results"]["hop_limit_by_server_bare_commands"] > 0
    assert report["machine"]["cores"] >= 1


def test_a_missing_redis_benchmark_is_told(tmp_path: Path) -> None:
    done = run("--json", path=str(tmp_path))
    assert done.returncode == 1
    assert "redis-tools" in done.stderr
