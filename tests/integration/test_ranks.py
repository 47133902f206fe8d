"""A run whose trainer has two ranks: it drains, ends with any of them, and goes on with another number."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.integration.harness import running
from tests.integration.processes import ROOT, Worker
from tests.integration.test_synchronous import _settings
from tests.weights.test_process import words_of

STARTS_S = 400.0  # torch is imported several times at once
SETTINGS = ("checkpoint.every_steps=2", "trainer.max_steps=1000", "staleness.max_staleness=2")


def ranks_of(trainer: Worker) -> list[psutil.Process]:
    """Those that rank 0 has started."""
    children = psutil.Process(trainer.pid).children()
    return [child for child in children if "workers.rank" in " ".join(words_of(child))]


def is_gone(process: psutil.Process) -> bool:
    """Also one that nobody has asked for its exit code: it has another parent by then."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def torchrun(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer on two ranks, as torchrun starts it."""
    settings = [word for item in words for word in ("--set", item)]
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*agent, "-m", "pipeline.cli", "trainer", *settings], stdout=output, stderr=output, cwd=ROOT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.timeout(1200)
async def test_a_run_goes_on_whatever_happens_to_a_rank_and_with_another_number_of_them(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    """Two ranks drain under torchrun (ddp); rank 0, then rank 1 of two is killed (fsdp); one rank ends the run."""
    async with running(tmp_path, valkey_url, run_name, *_settings(tmp_path), *SETTINGS) as run:
        run.start("generator")
        run.start("scorer")
        log = tmp_path / "torchrun.log"
        with torchrun([*run.overrides, "trainer.parallel='ddp'"], log) as agent:
            await run.until_steps(3, deadline_s=STARTS_S)
            ranks = psutil.Process(agent.pid).children()
            agent.terminate()
            await run.until(lambda: agent.poll() is not None, "the end of torchrun")
            assert len(ranks) >= 2
            assert not any(rank.is_running() for rank in ranks)
        assert '"event": "left"' in log.read_text()
        assert "error:" not in log.read_text()
        drained_at = run.num_steps

        doomed = run.start("trainer", "trainer.num_ranks=2")
        await run.until(lambda: len(ranks_of(doomed)) == 1, "rank 1", deadline_s=STARTS_S)
        (rank_1,) = ranks_of(doomed)
        doomed.kill()
        await run.until(lambda: is_gone(rank_1), "the end of rank 1")

        loses = run.start("trainer", "trainer.num_ranks=2", may_fail=True)
        await run.until_steps(drained_at + 2, deadline_s=STARTS_S)
        assert loses.events_named("resumed")[0]["step"] == drained_at
        (rank_1,) = ranks_of(loses)
        rank_1.kill()
        assert await run.until_exit(loses) == [1]
        assert loses.events_named("rank_lost")
        await run.ledger()

        ends = run.start("trainer", f"trainer.max_steps={run.num_steps + 2}")
        await run.until_over(deadline_s=STARTS_S)
        assert ends.events_named("resumed")
        assert (await run.ledger()).trained >= 4 * run.num_steps
        assert all(row["rank_balance"] > 0.5 for row in run.steps if "rank_balance" in row)
