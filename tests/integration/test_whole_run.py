"""The whole pipeline, as processes, from the first prompt to the end of the run."""

from __future__ import annotations

from pathlib import Path

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
