"""What a run promises holds while the numbers of its workers change.

Scenarios E1, E2, E6 and E8 by `rollstream scale` on an `up`, S1 and S7 with generators that join and leave.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
from collections.abc import Callable
from pathlib import Path

from pipeline.keys import Stream
from pipeline.records.recorder import read_metrics
from tests.integration.harness import POLL_S, SCRIPTED, Run, running
from tests.integration.test_staleness import FAST_GENERATOR
from tests.integration.test_up import DEADLINE_S, Up, accounts, ask, until, up

__all__ = ["up"]


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def rate(one: Up, num_steps: int) -> float:
    """Steps a second over the next so many, by the trainer's clock."""
    first = len(read_metrics(one.run_dir))
    until(lambda: len(read_metrics(one.run_dir)) >= first + num_steps, f"{num_steps} steps")
    rows = read_metrics(one.run_dir)
    return num_steps / (rows[first + num_steps - 1]["run_s"] - rows[first - 1]["run_s"])


def until_trained_more(one: Up, num_steps: int) -> None:
    before = len(read_metrics(one.run_dir))
    until(lambda: len(read_metrics(one.run_dir)) >= before + num_steps, f"{num_steps} steps more")


def alive(one: Up, role: str) -> int:
    status = json.loads(ask(one, "status", "--json").out)
    return sum(worker["role"] == role and bool(worker["status"]["ready"]) for worker in status["workers"])


def test_a_run_without_generators_says_what_it_lacks_and_goes_on_as_fast_as_there_are_generators(
    up: Callable[..., Up],
) -> None:
    # A generator makes one group after another, each in 0.8 s: long beside what a busy machine adds.
    settings = (
        "generation.scripted.tokens_per_s=10",
        "generation.max_num_seqs=2",
        "staleness.max_staleness=8",
        "trainer.groups_per_step=2",
    )
    one = up("a", "--no-exporter", *words(*settings, "trainer.scripted_step_s=0"))
    one.until_it_trains()
    alone = rate(one, 2)
    assert ask(one, "scale", "generators=0").code == 0
    until(lambda: "generator-1 is done" in one.log.read_text(), "the generator to leave")
    limit = json.loads(ask(one, "status", "--json").out)["limit"]
    assert (limit["stage"], limit["is_blocked"]) == ("generator", True)
    assert limit["reason"].startswith("no generator is alive")
    assert ask(one, "scale", "generators=3").code == 0
    until(lambda: alive(one, "generator") == 3, "three generators")
    until_trained_more(one, 2)
    assert rate(one, 6) > 2 * alone
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(DEADLINE_S) == 0, one.log.read_text()
    ledger, _ = accounts(one.run_dir)
    assert ledger.balances
    assert (ledger.dead, ledger.num_dropped, ledger.refused) == (0, 0, 0)


async def come_and_go(run: Run) -> None:
    """Two more generators, and after some steps none of them."""
    helpers = [run.start("generator") for _ in range(2)]
    await run.until_ready(*helpers)
    await run.until_steps(run.num_steps + 8)
    for helper in helpers:
        helper.signal(signal.SIGTERM)
    assert await run.until_exit(*helpers) == [0, 0]


async def test_generators_that_come_and_go_waste_nothing_and_keep_the_bound(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *FAST_GENERATOR, "trainer.max_steps=40") as run:
        run.start_all()
        await run.until_steps(6)
        await come_and_go(run)
        await run.until_over()
        ledger = await run.ledger()
        assert ledger.dropped.get("stale", 0) < 0.01 * ledger.fed
        assert max(row["staleness_max"] for row in run.steps) <= 4


async def test_the_mean_age_of_tokens_is_what_littles_law_says(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    """A group of age n is there, generated and not yet trained, at the ends of n + 1 steps.

    So the groups that are there when a step ends, over those that a step takes, are the mean age and one.
    """
    settings = ("trainer.scripted_step_s=0.25", "trainer.max_steps=40", "staleness.max_staleness=4")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        there: dict[int, int] = {}

        async def look() -> None:
            """Keep what was there last before each step's groups were counted."""
            while True:
                trained, depths = (await run.ledger()).trained, await run.streams.depths()
                if (await run.ledger()).trained == trained:  # all of it is from before the step was counted
                    there[trained] = depths[Stream.ROLLOUTS].length + depths[Stream.SCORED].length
                await asyncio.sleep(POLL_S / 4)

        looking = asyncio.create_task(look())
        await run.until_steps(8)
        await come_and_go(run)
        await run.until_over()
        looking.cancel()
        num_groups = run.config.trainer.groups_per_step
        rows = run.steps[8:-6]  # filled, and not yet running empty
        rows = [row for row in rows if int(row["step"] - 1) * num_groups in there]  # a busy machine misses some
        assert len(rows) > 10
        seen = [there[int(row["step"] - 1) * num_groups] for row in rows]
        mean_age = statistics.fmean(row["staleness_mean"] for row in rows)
        assert mean_age > 1, "generators did not run ahead"
        assert abs(statistics.fmean(seen) / num_groups - 1 - mean_age) < 0.05 * mean_age
