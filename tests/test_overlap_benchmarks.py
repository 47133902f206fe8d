"""The benchmarks of overlap and scaling run, report in the common shape, and refuse what makes no sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import overlap, scaling

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", f"benchmarks.{name}", "--json", *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def results(done: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == name
    assert report["machine"]["cores"] >= 1
    found: dict[str, Any] = report["results"]
    return found


def test_overlap_compares_both_ways_with_the_bound() -> None:
    done = run("overlap", "--step-s", "0.2", "--sync-steps", "2", "--async-steps", "3", "--sigmas", "0.5")
    found = results(done, "overlap")
    assert found["speedup_sigma_05"] > 0, "more than 1, where nothing else keeps the machine busy"
    assert found["bound_sigma_05"] > 1
    assert found["speedup_vs_bound_sigma_05"] == pytest.approx(
        found["speedup_sigma_05"] / found["bound_sigma_05"], abs=1e-3
    )
    assert 0 <= found["trainer_idle_ratio"] <= 1
    assert 0 <= found["stale_drop_ratio"] <= 1
    assert found["synchronous_vs_drawn_sigma_05"] >= 1


def test_scaling_counts_what_is_trained_and_loses_nothing() -> None:
    found = results(run("scaling", "--numbers", "1", "2", "--group-s", "0.3", "--window-s", "2"), "scaling")
    assert found["efficiency_1"] == 1
    assert found["efficiency_2"] > 0
    assert found["groups_per_s_1"] > 0
    assert found["efficiency_2"] == pytest.approx(found["groups_per_s_2"] / found["groups_per_s_1"] / 2, abs=0.01)
    assert found["lost"] == 0


@pytest.mark.parametrize(
    ("benchmark", "words"),
    [
        (overlap, ("--step-s", "0")),
        (overlap, ("--async-steps", "0")),
        (overlap, ("--sigmas", "-1")),
        (scaling, ("--numbers", "4", "1")),
        (scaling, ("--numbers", "1")),
        (scaling, ("--window-s", "0")),
    ],
)
def test_what_makes_no_sense_is_refused(
    benchmark: ModuleType, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *words])
    with pytest.raises(SystemExit, match=r"^error: --"):
        benchmark.main()
