"""The whole pipeline, as processes, from the first prompt to the end of the run."""

from __future__ import annotations

from pathlib import Path

from pipeline.run_record import read_record
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
