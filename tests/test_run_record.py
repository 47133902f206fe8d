"""What is said of a run that has ended, from its directory alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline.config import Config
from pipeline.fleet import Fleet, WorkerInfo
from pipeline.keys import Keys
from pipeline.queues.ledger import Ledger
from pipeline.records.recorder import Recorder
from pipeline.run.predecessor import changed_settings, keep_settings
from pipeline.run.record import read_record
from pipeline.settings.files import load_config
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
    assert "nobody works at this run, and the run is not over (2 steps are done): started again" in ask("status").out
    keep_settings(settings_of(run_dir, "trainer.max_steps=10"))
    assert "not over (2 of 10 steps are done): started again, it goes on" in ask("status").out


async def test_a_run_whose_workers_were_all_drained_says_how_far_it_is_and_how_it_goes_on(
    ask: Ask, run_dir: Path, redis: Redis, keys: Keys
) -> None:
    run_id = await Fleet(redis, keys).join({"lora.rank": "0"})
    (run_dir / "run.json").write_text(json.dumps({"run": run_dir.name, "run_id": run_id, "ended": None}))
    keep_settings(settings_of(run_dir, "trainer.max_steps=10"))
    await Fleet(redis, keys).register(WorkerInfo(worker_id="exporter-x", role="exporter", host="here", pid=1))
    said = (await asyncio.to_thread(ask, "status")).out.splitlines()
    assert said[0].startswith(f"run {run_dir.name}  step 2 ")
    assert said[1] == (
        "no worker is alive, and the run is not over (2 of 10 steps are done): started again, it goes on from its last "
        "checkpoint"
    )
    await Fleet(redis, keys).stop("the data has ended")
    assert "the run is over: the data has ended" in (await asyncio.to_thread(ask, "status")).out


def settings_of(run_dir: Path, *overrides: str) -> Config:
    words = [f"run.name={run_dir.name}", f"run.dir='{run_dir.parent}'", *overrides]
    return load_config([], environ={}, overrides=words)


def test_settings_that_a_trainer_has_and_the_last_one_had_not_are_named_with_both_values(run_dir: Path) -> None:
    keep_settings(settings_of(run_dir, "trainer.max_steps=400", "queues.lease_s=10", "redis.url='redis://u:pw@h:1'"))
    assert changed_settings(settings_of(run_dir, "trainer.max_steps=400", "queues.lease_s=10.0")) == ""
    assert changed_settings(settings_of(run_dir, "trainer.max_steps=20")) == (
        "queues.lease_s = 30.0 here, 10.0 before; trainer.max_steps = 20 here, 400 before"
    )
    both_say = ("trainer.max_steps=400", "queues.lease_s=10")
    assert changed_settings(settings_of(run_dir, *both_say, "worker.port=4000", "lora.rank=8")) == "", (
        "not its business"
    )
    assert "pw" not in (run_dir / "trainer.toml").read_text()
    (run_dir / "trainer.toml").write_text("= broken")
    assert changed_settings(settings_of(run_dir)) == ""


def test_a_run_that_was_removed_from_a_server_is_known_by_its_directory(ask: Ask, run_dir: Path) -> None:
    end(run_dir, "the data has ended")
    said = ask("status").out
    assert "step 2  version 2  reward 0.750  eval 0.500" in said
    assert "the run is over: the data has ended" in said


def test_a_run_that_left_no_record_still_asks_for_a_server(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL")
    assert ask("status").code == 2


@pytest.mark.parametrize("stored", ['{"ledger": {"fed": "x"}}', '{"ledger": {"dropped": [1]}}', "[" * 100_000, "[1]"])
def test_accounts_that_are_none_are_as_if_there_were_none(run_dir: Path, stored: str) -> None:
    (run_dir / "run.json").write_text(stored)
    (run_dir / "trainer.toml").write_text("[trainer]\nmax_steps = 'many'\n")
    record = read_record(run_dir)
    assert record is not None
    assert (record.step, record.max_steps, record.ended, record.ledger) == (2, 0, None, None)


def test_a_run_that_was_killed_has_a_record_without_accounts(run_dir: Path) -> None:
    record = read_record(run_dir)
    assert record is not None
    assert (record.step, record.max_steps, record.ended, record.ledger) == (2, 0, None, None)
    assert record.values == {"reward_mean": 0.75, "staleness_mean": 1.5, "weight_version": 2.0, "eval_reward": 0.5}
