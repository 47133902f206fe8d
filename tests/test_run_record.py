"""What is said of a run that has ended, from its directory alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.queues.ledger import Ledger
from pipeline.records.recorder import Recorder
from pipeline.run.record import read_record
from tests.conftest import Answer

Ask = Callable[..., Answer]
LEDGER = Ledger(fed=40, trained=38, dropped={"stale": 2}, eval_fed=4, eval_done=4)


@pytest.fixture
def run_dir(tmp_path: Path, run_name: str) -> Path:
    """Of a run that had two steps, and an evaluation before the last."""
    folder = tmp_path / "runs" / run_name
    recorder = Recorder(folder, "trainer", clock=lambda: 1000.0)
    recorder.metrics(1, {"reward_mean": 0.25, "staleness_mean": 1.0, "weight_version": 1.0})
    recorder.metrics(1, {"eval_reward": 0.5})
    recorder.metrics(2, {"reward_mean": 0.75, "staleness_mean": 1.5, "weight_version": 2.0})
    return folder


def end(run_dir: Path, ended: str | None) -> None:
    identity = {"run": run_dir.name, "run_id": "abc", "weight_version": 2, "ended": ended, "ledger": asdict(LEDGER)}
    (run_dir / "run.json").write_text(json.dumps(identity))


def test_a_run_whose_own_server_is_gone_shows_how_it_ended(
    ask: Ask, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL")
    end(run_dir, "all 2 steps are done")
    answer = ask("status")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        f"run {run_dir.name}  step 2  version 2  reward 0.750  eval 0.500  staleness 1.50",
        "the run is over: all 2 steps are done",
        "",
        "fed 40 = trained 38 + dropped 2 (stale 2) + dead 0 + live 0",
        "evaluation 4 of 4",
    ]
    told = json.loads(ask("status", "--json", "--watch").out)
    assert (told["step"], told["eval_reward"], told["ledger"]["trained"]) == (2, 0.5, 38)


def test_a_run_that_stopped_before_its_end_says_how_it_goes_on(
    ask: Ask, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL")
    end(run_dir, None)
    assert "started again, it goes on" in ask("status").out


def test_a_run_that_was_removed_from_a_server_is_known_by_its_directory(ask: Ask, run_dir: Path) -> None:
    end(run_dir, "the data has ended")
    said = ask("status").out
    assert "step 2  version 2  reward 0.750  eval 0.500" in said
    assert "the run is over: the data has ended" in said


def test_a_run_that_left_no_record_still_asks_for_a_server(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL")
    assert ask("status").code == 2


def test_a_run_that_was_killed_has_a_record_without_accounts(run_dir: Path) -> None:
    record = read_record(run_dir)
    assert record is not None
    assert (record.step, record.ended, record.ledger) == (2, None, None)
    assert record.values == {"reward_mean": 0.75, "staleness_mean": 1.5, "weight_version": 2.0, "eval_reward": 0.5}
