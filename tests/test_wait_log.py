"""An idle worker says that it waits, and does not drown its log in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.worker.wait_log import WaitLog

Wait = Callable[[float], str | None]


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def said(clock: Clock, log: WaitLog, seconds: Iterable[float], what: Wait) -> list[float]:
    """At which seconds of one wait it is said."""
    began = clock.now
    moments = []
    for second in seconds:
        clock.now = began + second
        if log.is_due(what(second), second):
            moments.append(second)
    log.is_due(None, 0.0)
    return moments


def half_seconds(until_s: float) -> list[float]:
    return [index / 2 for index in range(int(2 * until_s) + 1)]


def test_a_long_wait_is_said_ever_more_seldom() -> None:
    clock = Clock()
    log = WaitLog(clock=clock)
    moments = said(clock, log, half_seconds(1900), lambda _: "groups on the stream of prompts")
    assert moments == [2, 10, 30, 60, 120, 300, 600, 1200, 1800]


def test_many_short_waits_for_the_same_are_said_once_a_minute() -> None:
    clock = Clock()
    log = WaitLog(clock=clock)
    waits = [said(clock, log, half_seconds(5), lambda _: "groups") for _ in range(25)]
    assert [len(moments) for moments in waits] == [1, *[0] * 12, 1, *[0] * 11]
    assert said(clock, log, half_seconds(12), lambda _: "groups") == [10]


def test_what_changes_while_a_wait_goes_on_is_said_at_once_and_numbers_are_no_change() -> None:
    clock = Clock()
    log = WaitLog(clock=clock)

    def what(second: float) -> str:
        return "its model to load" if second < 5 else f"weights of version {second:.0f} (serving {second:.0f})"

    assert said(clock, log, half_seconds(40), what) == [2, 5, 10, 30]


def test_nothing_is_said_of_a_worker_that_works() -> None:
    clock = Clock()
    log = WaitLog(clock=clock)
    assert said(clock, log, half_seconds(1.5), lambda _: "groups") == []
    assert said(clock, log, half_seconds(100), lambda _: None) == []
