"""A whole run under faults against the same run left in peace: losses, throughput, time until it is well again.

Real processes with the scripted engine and the scripted trainer, on a server with an append-only file.
Workers are killed, stalled, drained, replaced, given wrong clocks; the server is killed, frozen, made to
forget its scripts; the way of the weights is cut, the trainer's disk is full, rewards are slow or fail,
bytes that nobody can read are put into the streams. In the end every group is looked up by its id.

    python -m benchmarks.chaos --minutes 10 --json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import report
from tests.chaos.schedule import rounds
from tests.chaos.world import World, world

_PEACE_SHARE = 0.15
_FAULTS_PER_MINUTE = 22
_ROLES = {"generator": 5, "scorer": 3, "trainer": 1, "exporter": 1}
# The trainer is what limits the rate in peace, as it should be: generators have a quarter to spare.
_SETTINGS = ("generation.max_num_seqs=24", "trainer.scripted_step_s=0.4")


async def _in_peace(folder: Path, seconds: float, seed: int) -> float:
    """Groups trained a second without faults."""
    async with world(folder, "peace", *_SETTINGS, seed=seed, roles=_ROLES) as here:
        started, before = time.monotonic(), await here.num_trained()
        await asyncio.sleep(seconds)
        return (await here.num_trained() - before) / (time.monotonic() - started)


async def _strike(here: World, seconds: float, num_faults: int, seed: int) -> None:
    """So many faults in so much time, evenly; a round begins when the run has got over the one before."""
    started, num_struck = time.monotonic(), 0
    for together in rounds(seed, num_faults, at_once=2):
        due = started + seconds * num_struck / num_faults
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        async with asyncio.TaskGroup() as group:
            for fault in together:
                group.create_task(here.strike(fault))
        num_struck += len(together)


def _recovery(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2), "times": len(seconds)}


async def _run(minutes: float, seed: int) -> dict[str, object]:
    seconds, num_faults = 60 * minutes, math.ceil(_FAULTS_PER_MINUTE * minutes)
    with tempfile.TemporaryDirectory() as folder:
        peaceful = await _in_peace(Path(folder) / "peace", _PEACE_SHARE * seconds, seed)
    with tempfile.TemporaryDirectory() as folder:
        async with world(Path(folder), "chaos", *_SETTINGS, seed=seed, roles=_ROLES) as here:
            started, before = time.monotonic(), await here.num_trained()
            await _strike(here, (1 - _PEACE_SHARE) * seconds, num_faults, seed)
            rate = (await here.num_trained() - before) / (time.monotonic() - started)
            found = await here.end()
            lease_s = here.run.config.queues.lease_s
    return {
        "faults": num_faults,
        "lost": len(found.lost),
        "trained_twice": len(found.trained_twice),
        "throughput_ratio": round(rate / peaceful, 3),
        "recovery_s": {fault.value: _recovery(times) for fault, times in sorted(here.recoveries.items())},
        "lease_s": lease_s,
        "groups_fed": len(found.fed),
        "groups_trained": found.committed.total(),
        "groups_dropped": dict(Counter(found.dropped.values())),
        "groups_dead": len(found.dead),
        "refused": found.ledger.refused,
        "problems": [*found.problems, *here.crew.problems],
        "groups_per_s": round(rate, 2),
        "groups_per_s_in_peace": round(peaceful, 2),
        "seed": seed,
        "minutes": minutes,
    }


def main() -> None:
    """Run for as long as was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report("chaos", asyncio.run(_run(arguments.minutes, arguments.seed)), as_json=arguments.json)


if __name__ == "__main__":
    main()
