"""The benchmark of the weights runs, reports in the common shape, and names what is asked of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.weight_states import entropy_bytes, moved, random_weights

ROOT = Path(__file__).parents[2]


def test_the_last_line_is_one_object_with_the_ratios() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weights", *("--json", "--rounds", "1", "--model-mib", "2", "--layers", "1")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    results = report["results"]
    assert report["benchmark"] == "weights"
    assert 1 < results["delta_vs_entropy_1pct"] < 1.25
    assert results["xor_zstd_vs_delta_1pct"] > 1.7
    assert results["gap_abs_zstd_vs_delta_1pct"] > 1.7
    for name in ("decode_apply_vs_memcpy", "decode_apply_vs_xor", "encode_vs_memcpy"):
        assert results[name] >= results[f"{name}_worst"] > 0
    assert set(results["by_density"]) == {"0.3pct", "1pct", "3pct", "10pct"}
    assert set(results["adamw"]) == {"1e-06", "1e-05"}


def test_the_bound_is_the_entropy_of_positions_and_differences() -> None:
    old = np.zeros(1024, dtype=np.uint16)
    new = old.copy()
    new[:512:2], new[1:512:2] = 1, 0xFFFF  # half of all, and each difference for half of those: 1 bit, and 1 of 2
    assert entropy_bytes(old, new) == pytest.approx((1024 + 512) / 8)


def test_a_made_up_version_has_the_density_that_was_asked_for() -> None:
    old = random_weights(1 << 20)
    assert np.count_nonzero(moved(old, 0.03) != old) / len(old) == pytest.approx(0.03, rel=0.05)
