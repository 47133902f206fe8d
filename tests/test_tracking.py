"""Trackers: numbers arrive where they should, and a tracker that fails is only a warning."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.config import TrackingSettings
from pipeline.errors import ConfigError
from pipeline.records.tracking import BackgroundTracker, create_trackers

STAND_IN_FOR_WANDB = """
import json

def keep(record):
    with open({out!r}, "a") as file:
        file.write(json.dumps(record) + "\\n")

class Run:
    def define_metric(self, *names, **settings): pass
    def log(self, record): keep(record)
    def finish(self): pass

def init(**settings):
    keep(settings)
    return Run()
"""


class Remembers:
    """A tracker that keeps what it gets, and misbehaves where told to."""

    def __init__(self, problem: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.problem = problem
        self.gate = gate
        self.records: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.problem is not None:
            raise self.problem
        self.records.append((step, metrics))

    def close(self) -> None:
        self.is_closed = True


def test_a_tracker_gets_every_finite_number_in_order() -> None:
    inner = Remembers()
    tracker = BackgroundTracker("test", lambda: inner)
    for step in range(5):
        tracker.log(step, {"reward_mean": step / 2, "kl": float("nan")})
    tracker.close()
    assert inner.records == [(step, {"reward_mean": step / 2}) for step in range(5)]
    assert inner.is_closed
    assert tracker.num_lost == 0


def test_names_that_users_chose_stand_below_a_name_of_ours() -> None:
    inner = Remembers()
    tracker = BackgroundTracker("test", lambda: inner)
    tracker.log(1, {"eval_reward": 0.5, "eval_rewards": {"step": 1.0, "eval_reward": 0.25, "bad": float("nan")}})
    tracker.close()
    assert inner.records == [(1, {"eval_reward": 0.5, "eval_rewards/step": 1.0, "eval_rewards/eval_reward": 0.25})]


def test_a_tracker_that_raises_is_logged_once_and_counted() -> None:
    inner = Remembers(problem=ConnectionError("the service is down"))
    with capture_logs() as logs:
        tracker = BackgroundTracker("test", lambda: inner)
        for step in range(3):
            tracker.log(step, {"reward_mean": 0.0})
        tracker.close()
    assert [(entry["event"], entry["consequence"]) for entry in logs] == [("tracker_failed", "training goes on")]
    assert "the service is down" in logs[0]["problem"]
    assert tracker.num_lost == 3


@pytest.mark.parametrize("problem", [RuntimeError("no network"), SystemExit(1)])
def test_a_tracker_that_does_not_start_loses_its_records_only(problem: BaseException) -> None:
    def refuse() -> Remembers:
        raise problem

    with capture_logs() as logs:
        tracker = BackgroundTracker("test", refuse)
        tracker.log(1, {"reward_mean": 0.0})
        tracker.close()
    assert "it did not start" in logs[0]["problem"]
    assert tracker.num_lost == 1


def test_a_tracker_that_hangs_delays_neither_a_step_nor_the_end() -> None:
    gate = threading.Event()
    with capture_logs() as logs:
        tracker = BackgroundTracker("test", lambda: Remembers(gate=gate), max_waiting=2, close_s=0.05)
        for step in range(10):
            tracker.log(step, {"reward_mean": 0.0})
        tracker.close()
    assert len(logs) == 1
    assert tracker.num_lost >= 7
    gate.set()


def test_tensorboard_files_hold_the_numbers_and_torch_is_not_needed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (tracker,) = create_trackers(TrackingSettings(trackers=["tensorboard"]), tmp_path, "run", {})
    tracker.log(7, {"reward_mean": 0.25})
    tracker.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert values == [(7, "reward_mean", 0.25)]


def test_a_tracker_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match=r"'trackio', which is not installed: pip install rollstream\[tracking\]"):
        create_trackers(TrackingSettings(trackers=["trackio"]), tmp_path, "run", {})


def test_a_restarted_trainer_goes_on_with_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(STAND_IN_FOR_WANDB.format(out=str(tmp_path / "sent.jsonl")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    settings = TrackingSettings(trackers=["wandb"], project="mine")
    for step in (1, 2):
        (tracker,) = create_trackers(settings, tmp_path / "run", "name", {"trainer": {"max_steps": 5}})
        tracker.log(step, {"reward_mean": 0.5})
        tracker.close()
    first, record, second, _ = [json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines()]
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("mine", "name", "allow")
    assert first["config"] == {"trainer": {"max_steps": 5}}
    assert record == {"reward_mean": 0.5, "step": 1}
