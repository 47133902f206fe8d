"""A run that learns nothing says so, and not at every step."""

from __future__ import annotations

from pipeline.run.signal import SignalWatch


def said(rows: list[dict[str, float]]) -> list[int]:
    watch = SignalWatch()
    return [step for step, row in enumerate(rows, start=1) if watch.step(row)]


EQUAL = {"groups": 4.0, "zero_variance_groups": 4.0}
UNSCORED = {"groups": 4.0, "zero_variance_groups": 1.0, "unscored_groups": 3.0}
TELLING = {"groups": 4.0, "zero_variance_groups": 3.0}


def test_it_is_said_after_twenty_steps_and_then_at_each_doubling() -> None:
    assert said([EQUAL, UNSCORED] * 50) == [20, 40, 80]


def test_one_group_that_teaches_begins_the_count_anew() -> None:
    assert said([*[EQUAL] * 19, TELLING, *[EQUAL] * 20]) == [40]
    assert said([TELLING] * 100) == []
