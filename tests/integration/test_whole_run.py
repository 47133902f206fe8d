"""The whole pipeline, as processes, from the first prompt to the end of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.run.record import read_record
from tests.integration.harness import SCRIPTED, running


async def test_a_run_ends_by_itself_and_every_group_is_accounted_for(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED) as run:
        run.start_all(generators=2, scorers=2)
        await run.until_over()
        ledger = await run.ledger()
        assert ledger.trained == 40
        assert ledger.fed == ledger.trained
        assert ledger.uncommitted == 0
        assert [row["step"] for row in run.metrics] == list(range(1, 11))
        record = read_record(run.config.run_dir)
        assert record is not None
        assert (record.step, record.ended, record.ledger) == (10, "all 10 steps are done", ledger)
        said = (await run.command("status")).out
        assert f"run {run_name}  step 10  version 10  reward" in said
        assert "the run is over: all 10 steps are done" in said


OUR_NAMES = ("reward", "step", "prompts", "event", "level", "timestamp", "weight_version", "time", "role", "num_scored")


async def test_rewards_may_be_called_like_fields_of_ours(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    rewards = ", ".join(f"{{function='length', name='{name}'}}" for name in OUR_NAMES)
    settings = (
        f"scoring.rewards=[{rewards}]",
        f"data.eval_path={json.dumps(str(held_out))}",
        "trainer.max_steps=2",
        "tracking.trackers=['tensorboard']",
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all()
        await run.until_over()
        evaluations = [row for row in run.metrics if "eval_reward" in row]
        assert len(evaluations) == len(trainer.events_named("evaluation")) == 2
        for row, event in zip(evaluations, trainer.events_named("evaluation"), strict=True):
            assert row["eval_rewards"].keys() == set(OUR_NAMES)
            assert event["rewards"].keys() == set(OUR_NAMES)
            assert (row["role"], event["level"], event["step"]) == ("trainer", "info", row["step"])
            assert event["prompts"] == 2
            assert row["eval_reward"] == pytest.approx(sum(row["eval_rewards"].values()))
            assert row["eval_num_scored"] == 2
        assert trainer.events_named("tracker_failed") == []
