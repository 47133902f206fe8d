"""When the workers of a colocated run had the device, from their logs."""

from __future__ import annotations

import itertools
from datetime import datetime

from tests.integration.processes import Worker

Turns = list[tuple[float, float]]


def turns_of(worker: Worker) -> Turns:
    """When a worker had the device, in seconds; a turn that it did not end lasts for ever."""
    events = [event for event in worker.events if event.get("event") in {"device_taken", "device_given"}]
    times = [datetime.fromisoformat(str(event["timestamp"])).timestamp() for event in events]
    names = [event["event"] for event in events]
    assert names == (["device_taken", "device_given"] * len(names))[: len(names)]
    return list(zip(times[::2], [*times[1::2], float("inf")], strict=False))


def assert_apart(turns: Turns) -> None:
    ordered = sorted(turns)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered)), ordered
