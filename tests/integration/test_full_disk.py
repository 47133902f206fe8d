"""The disk is full for a while: training goes on, and nothing is lost but records.

Scenario R4.
"""

from __future__ import annotations

import resource
from pathlib import Path

from pipeline.checkpoints import Checkpoints
from tests.integration.harness import SCRIPTED, running


async def test_a_trainer_whose_disk_is_full_goes_on_and_commits_when_there_is_room_again(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = ("trainer.max_steps=100000", "trainer.scripted_step_s=0.05", "checkpoint.every_steps=2")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all()
        await run.until(lambda: trainer.events_named("checkpoint_written") != [], "a checkpoint")
        saved = Checkpoints(run.config.run_dir / "checkpoints", run.config.checkpoint)
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        before, version = saved.latest(), await run.fleet.version() or 0
        assert before is not None

        async def has_gone_on() -> bool:
            return (await run.fleet.version() or 0) >= version + 8

        await run.until(has_gone_on, "steps of a trainer that can write nothing")
        found = saved.latest()
        assert found is not None
        assert found.step <= before.step + 2, "one may have been under way"
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        def is_saved() -> bool:
            latest = saved.latest()
            return latest is not None and latest.step > version + 8

        await run.until(is_saved, "a checkpoint after the disk had room again")
        await run.fleet.stop("the test is over")
        await run.until_over()
        assert (await run.ledger()).uncommitted == 0
