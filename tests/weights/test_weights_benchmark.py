"""The benchmark of the weights runs, reports in the common shape, and names what is asked of it.

Those of its sections that need torch run here, where it is imported, and the others as a command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.weight_states import Scale, entropy_bytes, moved, random_weights
from benchmarks.weights import SECTIONS

ROOT = Path(__file__).parents[2]


def reported(section: str, *, model_mib: int) -> dict[str, Any]:
    """The results of one section, from the last line that the command prints."""
    size = ("--rounds", "1", "--model-mib", str(model_mib), "--layers", "1", "--width", "256")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weights", "--json", "--section", section, *size],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "weights"
    results: dict[str, Any] = report["results"]
    return results


def measured(section: str, *, model_mib: int) -> dict[str, Any]:
    """The same of a small model, measured by this process."""
    return dict(SECTIONS[section](Scale(rounds=1, num_bytes=model_mib << 20, num_layers=1, width=256)))


def test_patches_are_compared_with_the_entropy_and_a_copy() -> None:
    results = measured("codec", model_mib=2)
    assert 1 < results["delta_vs_entropy_1pct"] < 1.25
    assert results["xor_zstd_vs_delta_1pct"] > 1.7
    assert results["gap_abs_zstd_vs_delta_1pct"] > 1.7
    for name in ("decode_apply_vs_memcpy", "decode_apply_vs_xor", "encode_vs_memcpy"):
        assert results[name] >= results[f"{name}_worst"] > 0
    assert set(results["by_density"]) == {"0.3pct", "1pct", "3pct", "10pct"}
    assert set(results["adamw"]) == {"1e-06", "1e-05"}


def test_a_snapshot_eight_engines_and_eight_machines_are_measured_in_processes() -> None:
    results = reported("transport", model_mib=4)
    assert results["snapshot_vs_raw_socket"] > 0
    assert results["eight_local_vs_one_worst"] >= results["eight_local_vs_one"] > 0
    for kind in ("snapshot", "delta"):
        assert 1 <= results[f"egress_payloads_8_{kind}"] < 1.2


def test_links_that_can_be_made_here_have_a_row_and_all_others_a_reason() -> None:
    results = reported("links", model_mib=4)
    is_shaped = results["links_shaped_by"] == "network namespaces and tbf"
    assert set(results["links"]) == ({"loopback", "1gbit", "10gbit"} if is_shaped else {"loopback"})
    assert ("delta_speedup_1gbit" in results) is is_shaped
    for name, row in results["links"].items():
        assert results[f"choice_vs_best_{name}"] == row["choice_vs_best"] > 0
        assert row["bare_socket_gbit"] < {"1gbit": 1.5, "10gbit": 15}.get(name, 1000)


def test_a_cut_transfer_is_resumed_and_a_joiner_catches_up() -> None:
    results = reported("joining", model_mib=24)
    assert 0 < results["resume_bytes_ratio_worst"] <= 1
    assert 0.5 < results["resume_kept_share"] < 0.9
    assert results["joiner_vs_snapshot_worst"] >= results["joiner_vs_snapshot"] > 0


def test_steps_are_timed_with_and_without_a_publish_and_memory_is_that_of_processes() -> None:
    results = measured("trainer", model_mib=8)
    assert results["step_time_ratio_worst"] >= results["step_time_ratio"] > 0
    assert results["step_s"] > results["step_publish_s"] > 0
    for name in ("publisher", "subscriber"):
        assert 1 < results[f"{name}_memory_ratio"] <= results[f"{name}_memory_ratio_hurried"]


def test_the_bound_is_the_entropy_of_positions_and_differences() -> None:
    old = np.zeros(1024, dtype=np.uint16)
    new = old.copy()
    new[:512:2], new[1:512:2] = 1, 0xFFFF  # half of all, and each difference for half of those: 1 bit, and 1 of 2
    assert entropy_bytes(old, new) == pytest.approx((1024 + 512) / 8)


def test_a_made_up_version_has_the_density_that_was_asked_for() -> None:
    old = random_weights(1 << 20)
    assert np.count_nonzero(moved(old, 0.03) != old) / len(old) == pytest.approx(0.03, rel=0.05)
