"""Busy time is the time in which anything was in work, however much that was."""

from __future__ import annotations

from pipeline.worker.stage import BusyClock


def test_overlapping_groups_are_counted_once() -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    now = 1.0
    clock.begin()
    now = 2.0
    clock.begin()
    now = 4.0
    clock.end()
    now = 5.0
    clock.end()
    now = 8.0
    clock.advance()
    assert clock.busy_s == 4.0
    assert clock.ratio == 0.5


def test_a_clock_that_has_not_run_is_not_busy() -> None:
    assert BusyClock(lambda: 3.0).ratio == 0.0
