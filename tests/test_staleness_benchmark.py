"""The study of staleness: samples have the age asked for, equal arguments give equal numbers, runs are kept."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks.staleness import main, read, start_of
from benchmarks.staleness_figures import cells, estimate, figures, table
from benchmarks.staleness_run import Case, Curve, run_case
from pipeline.demo.prepare import Prepared

TINY = Case(
    correction="none",
    lag=2,
    seed=0,
    learning_rate=3e-4,
    groups_per_step=2,
    steps=4,
    evaluate_every=2,
    num_held_out=64,
)

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


@pytest.fixture(scope="module")
def prepared(starts: Path) -> Prepared:
    return start_of(starts, 0)


def case(**changes: object) -> Case:
    return dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


def test_every_token_is_as_old_as_was_asked_for_and_equal_arguments_give_equal_numbers(prepared: Prepared) -> None:
    aged = run_case(TINY, prepared)
    assert aged.samples == [0, 32, 64]
    assert len(aged.held_out) == len(aged.training) + 1 == 3
    assert aged.described["staleness_mean"] == 2.0
    assert aged.described["mismatch_kl"] > 0
    assert run_case(TINY, prepared) == aged


def test_without_a_lag_every_correction_is_the_same_update(prepared: Prepared) -> None:
    curves = [run_case(case(lag=0, correction=name), prepared) for name in ("none", "clip", "tis", "decoupled_ppo")]
    assert [curve.held_out for curve in curves] == [curves[0].held_out] * 4
    assert [curve.training for curve in curves] == [curves[0].training] * 4
    assert curves[0].described["staleness_mean"] == 0.0
    assert curves[0].described["effective_sample_size"] == 1.0


def test_a_preset_is_run_as_it_stands(prepared: Prepared) -> None:
    assert run_case(case(correction="grpo"), prepared) == run_case(case(correction="tis"), prepared)
    assert run_case(case(correction="dapo"), prepared).samples == [0, 32, 64], "groups of equal rewards are replaced"


def test_the_benchmark_adds_to_its_results_and_runs_nothing_twice(
    tmp_path: Path,
    starts: Path,
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results.jsonl"
    words = ["staleness", "--json", "--results", str(results), "--plot", str(tmp_path / "curves.png"), "--seeds", "1"]
    words += ["--starts", str(starts)]
    words += ["--steps", "2", "--groups-per-step", "2", "--held-out", "64", "--lags", "0", "1", "--corrections", "tis"]
    monkeypatch.setattr("sys.argv", words)
    main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["benchmark"] == "staleness"
    assert said["results"]["final_tis_lag_1"] >= 0
    assert said["results"]["loss_tis_lag_1"] is not None
    assert (tmp_path / "curves.png").stat().st_size > 0
    there = results.read_text()
    assert [(kept.correction, kept.lag) for kept, _ in read(results)] == [("none", 0), ("tis", 1)]
    main()
    assert results.read_text() == there


@pytest.mark.parametrize("words", [("--lags", "-1"), ("--steps", "0"), ("--seeds", "11"), ("--learning-rate", "0")])
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["staleness", *words])
    with pytest.raises(SystemExit, match=r"^error: --"):
        main()


def test_figures_are_means_over_seeds_and_losses_are_of_pairs() -> None:
    def curve(*held_out: float) -> Curve:
        samples = [128 * index for index in range(len(held_out))]
        return Curve(samples=samples, held_out=list(held_out), training=list(held_out[1:]), described={})

    curves = {
        case(lag=0, seed=0): curve(0.4, 0.9, 0.9, 0.9, 0.9),
        case(lag=0, seed=1): curve(0.4, 0.8, 0.8, 0.8, 0.8),
        case(lag=4, seed=0): curve(0.4, 0.7, 0.7, 0.7, 0.7),
        case(lag=4, seed=1): curve(0.4, 0.6, 0.6, 0.6, 0.6),
    }
    found = figures(curves)
    assert found["final_none_lag_0"] == 0.85
    assert found["loss_none_lag_4"] == 0.2
    assert found["loss_half_none_lag_4"] == 0.0, "both pairs lose the same"
    assert found["final_half_none_lag_4"] == pytest.approx(12.706 * 0.05, abs=1e-3)
    assert cells(curves)["none", 0].samples is None, "half of the runs is not most"
    assert cells(curves)["none", 0].reached == 0.5
    assert "| 4 | `none` | 0.650 ± 0.635 | 0.200 ± 0.000 |" in table(curves)
    assert math.isnan(estimate([0.5]).half)


@pytest.mark.parametrize("runs", ["staleness.jsonl", "staleness_decaying.jsonl", "presets.jsonl"])
def test_the_documentation_says_what_its_runs_say(runs: str) -> None:
    curves = dict(read(DOCS / "data" / runs))
    assert table(curves) in (DOCS / "algorithms.md").read_text(encoding="utf-8")
