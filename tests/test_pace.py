"""Which stage sets the pace: concluded once, by the trainer, from the steps of the last minute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.pace import Pace
from tests.groups import make_prompt, make_scored
from tests.run_states import depths, everyone, limit, worker


def step_of(pace: Pace, *, waited_s: float, generation_s: float = 1.0, scoring_s: float = 1.0, at: float = 4.0) -> None:
    """A step of four seconds, whose groups came so slowly."""
    group = make_scored(make_prompt(), [1.0, 0.0])
    hops = {"fed": 100.0, "generated": 100.0 + generation_s, "scored": 100.0 + generation_s + scoring_s}
    pace.step([replace(group, hops=hops)], ended_at=at, wall_s=4.0, waited_s=waited_s)


@pytest.mark.parametrize(
    ("times", "stage"),
    [
        ({"waited_s": 2.0, "generation_s": 3.0}, "generator"),
        ({"waited_s": 2.0, "scoring_s": 3.0}, "scorer"),
        ({"waited_s": 0.2, "generation_s": 3.0}, "trainer"),
    ],
)
def test_the_limit_is_what_the_trainer_concluded_whatever_the_queues_hold_now(
    times: dict[str, float], stage: str
) -> None:
    pace = Pace()
    step_of(pace, **times)
    said = pace.describe()
    assert said["limited_by"] == stage
    for streams in (depths(20, 1, 1), depths(1, 20, 1), depths(1, 1, 20), depths()):
        found = limit(streams, [*everyone()[:2], worker("trainer", **said)])
        assert (found.stage, found.is_blocked) == (stage, False)
        assert "in the last 4 s the trainer waited" in found.reason


def test_one_odd_step_among_many_changes_no_limit() -> None:
    pace = Pace()
    for number in range(1, 11):
        step_of(pace, waited_s=0.0, at=4.0 * number)
    step_of(pace, waited_s=4.0, at=44.0)
    assert pace.describe()["limited_by"] == "trainer"
    assert pace.describe()["pace_s"] == 40.0


def test_the_first_step_waits_for_a_start_and_counts_only_while_there_is_no_other() -> None:
    pace = Pace()
    step_of(pace, waited_s=4.0)
    assert pace.describe()["waited_ratio"] == 1.0
    step_of(pace, waited_s=0.0, at=8.0)
    assert pace.describe()["waited_ratio"] == 0.0


def test_steps_of_more_than_a_minute_ago_are_forgotten() -> None:
    pace = Pace()
    for at, waited_s in ((0.0, 0.0), (4.0, 0.0), (70.0, 4.0), (74.0, 4.0)):
        step_of(pace, waited_s=waited_s, at=at)
    assert pace.describe()["waited_ratio"] == 1.0


def test_generators_that_wait_for_weights_are_named_where_generation_is_slowest() -> None:
    pace = Pace()
    step_of(pace, waited_s=2.0, generation_s=3.0)
    stale = worker("generator", idle_cause="stale_weights", idle_ratio=0.6)
    assert limit(depths(4), [stale, worker("scorer"), worker("trainer", **pace.describe())]).stage == "weights"
    assert limit(depths(4), [stale, *everyone()[:2], worker("trainer", **pace.describe())]).stage == "generator"
