"""Whatever is killed, stalled, cut, filled or broken, in whatever order: every group is trained once.

Scenarios R1 and Q1 to Q4, Q6.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.schedule import Fault, rounds
from tests.chaos.world import world

NUM_FAULTS, SEED = 64, 20


def test_every_kind_of_fault_comes_and_the_same_seed_gives_the_same_order() -> None:
    faults = [fault for together in rounds(SEED, NUM_FAULTS) for fault in together]
    assert len(faults) == NUM_FAULTS
    assert set(faults) == set(Fault)
    assert faults == [fault for together in rounds(SEED, NUM_FAULTS) for fault in together]
    assert faults != [fault for together in rounds(SEED + 1, NUM_FAULTS) for fault in together]


@pytest.mark.timeout(1200)
async def test_every_group_is_trained_once_whatever_happens(short_path: Path, run_name: str) -> None:
    struck: list[str] = []
    async with world(short_path, run_name, seed=SEED) as here:
        try:
            for together in rounds(SEED, NUM_FAULTS):
                struck.append("+".join(together))
                async with asyncio.TaskGroup() as group:
                    for fault in together:
                        group.create_task(here.strike(fault))
                assert not here.crew.problems, here.crew.problems
            found = await here.end()
        except BaseException as error:
            error.add_note(f"seed {SEED}, after {struck}")
            raise
        assert not here.crew.problems, here.crew.problems
        assert not found.problems, (SEED, struck, found.problems)
        assert found.ledger.live == 0
        assert here.network.num_cuts > 0
