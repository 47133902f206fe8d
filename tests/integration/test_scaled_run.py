"""What a run promises holds while the numbers of its workers change.

Scenarios E1, E2, E6 and E8 by `rollstream scale` on an `up`, S1 and S7 with generators that join and leave.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.keys import Stream
from pipeline.records.recorder import read_metrics
from tests.integration.harness import POLL_S, SCRIPTED, Run, running
from tests.integration.test_staleness import FAST_GENERATOR
from tests.integration.test_up import DEADLINE_S, Up, accounts, ask, until, up

__all__ = ["up"]
SHORT_S = 0.05  # beside a step


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def until_faster_than(one: Up, steps_per_s: float, num_steps: int) -> None:
    """Wait until so many steps in a row came at a higher rate, by the trainer's clock."""
    first = len(read_metrics(one.run_dir))

    def were_fast() -> bool:
        times = [row["run_s"] for row in read_metrics(one.run_dir)[first:]]
        return any(num_steps / (b - a) > steps_per_s for a, b in zip(times, times[num_steps:], strict=False))

    until(were_fast, f"more than {steps_per_s} steps a second")


def alive(one: Up, role: str) -> int:
    status = json.loads(ask(one, "status", "--json").out)
    return sum(worker["role"] == role and bool(worker["status"]["ready"]) for worker in status["workers"])


def test_a_run_without_generators_says_what_it_lacks_and_goes_on_as_fast_as_there_are_generators(
    up: Callable[..., Up],
) -> None:
    # A generator makes one group after another, each in 0.8 s and never faster; a step takes two of them.
    most_of_one = 1 / (2 * 0.8)
    settings = (
        "generation.scripted.tokens_per_s=10",
        "generation.max_num_seqs=2",
        "staleness.max_staleness=8",
        "trainer.groups_per_step=2",
    )
    one = up("a", "--no-exporter", *words(*settings, "trainer.scripted_step_s=0"))
    one.until_it_trains()
    assert ask(one, "scale", "generators=0").code == 0
    until(lambda: "generator-1 is done" in one.log.read_text(), "the generator to leave")
    limit = json.loads(ask(one, "status", "--json").out)["limit"]
    assert (limit["stage"], limit["is_blocked"]) == ("generator", True)
    assert limit["reason"].startswith("no generator is alive")
    assert ask(one, "scale", "generators=3").code == 0
    until(lambda: alive(one, "generator") == 3, "three generators")
    until_faster_than(one, 2 * most_of_one, 6)
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
    # A generator that a busy machine keeps standing for five steps grows stale beside the others.
    slower = ("trainer.scripted_step_s=0.6", "generation.scripted.tokens_per_s=100", "trainer.max_steps=24")
    async with running(tmp_path, valkey_url, run_name, *FAST_GENERATOR, *slower) as run:
        run.start_all()
        await run.until_steps(5)
        await come_and_go(run)
        await run.until_over()
        ledger = await run.ledger()
        assert ledger.dropped.get("stale", 0) < 0.01 * ledger.fed
        assert max(row["staleness_max"] for row in run.steps) <= 4


async def test_the_mean_age_of_tokens_is_what_littles_law_says(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    """A group of age n is there, generated and not yet trained, at the ends of n + 1 steps.

    So the groups that are there when a step ends, over those that a step takes, are the mean age and one.
    """
    settings = ("trainer.scripted_step_s=0.25", "trainer.max_steps=100000", "staleness.max_staleness=4")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        num_groups = run.config.trainer.groups_per_step
        there: dict[int, tuple[float, int]] = {}  # groups trained -> last look before the next were: when, how many

        async def look() -> None:
            while True:
                looked_at, trained, depths = time.time(), (await run.ledger()).trained, await run.streams.depths()
                if (await run.ledger()).trained == trained:  # all of it is from before the step was counted
                    there[trained] = looked_at, depths[Stream.ROLLOUTS].length + depths[Stream.SCORED].length
                await asyncio.sleep(POLL_S / 4)

        def seen_at_their_end() -> list[tuple[dict[str, Any], int]]:
            """Steps from the ninth on, when all is filled, and what was there: only just before, or it says little."""
            looks = [(row, there.get((int(row["step"]) - 1) * num_groups)) for row in run.steps[8:]]
            return [(row, look[1]) for row, look in looks if look is not None and row["time"] - look[0] < SHORT_S]

        looking = asyncio.create_task(look())
        await run.until_steps(8)
        await come_and_go(run)
        await run.until(lambda: len(seen_at_their_end()) >= 24, "steps of which the end was seen")
        looking.cancel()
        rows, seen = zip(*seen_at_their_end(), strict=True)
        await run.fleet.stop("the test is over")
        await run.until_over()
        mean_age = statistics.fmean(row["staleness_mean"] for row in rows)
        assert mean_age > 1, "generators did not run ahead"
        assert abs(statistics.fmean(seen) / num_groups - 1 - mean_age) < 0.05 * mean_age
