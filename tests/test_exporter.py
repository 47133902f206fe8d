"""The exporter process: serves the run as a whole, and says when nothing moves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.fleet import WorkerInfo
from pipeline.keys import Keys
from pipeline.run.discovery import Targets
from pipeline.run.limits import Limit
from pipeline.run.status import collect
from pipeline.settings.files import load_config
from pipeline.worker.lifecycle import WorkerContext, run_worker
from workers import exporter


class Lines:
    """Keeps log events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    info = warning


@pytest.mark.usefixtures("logging_as_before")
def test_exporter_serves_the_run_until_it_is_drained(valkey_url: str, run_name: str) -> None:
    words = [f"run.name='{run_name}'", f"redis.url='{valkey_url}'", "exporter.interval_s=0.05"]
    seen: list[str] = []
    targets: list[dict[str, Any]] = []

    async def body(context: WorkerContext) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(exporter.body(context))
            while True:
                if context.state.is_ready:
                    break
                await asyncio.sleep(0.01)
            with await asyncio.to_thread(urllib.request.urlopen, f"http://{context.address}/metrics") as answer:
                seen.append(answer.read().decode())
            with await asyncio.to_thread(urllib.request.urlopen, f"http://{context.address}/targets") as answer:
                targets.extend(json.load(answer))
            targets.append({"targets": [context.address]})
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_worker("exporter", load_config([], environ={}, overrides=words), body, joins=False) == 0
    assert f'rollstream_stream_length{{run="{run_name}",stream="prompts"}} 0.0' in seen[0]
    found, itself = targets
    assert found["targets"] == itself["targets"]
    assert (found["labels"]["__meta_rollstream_run"], found["labels"]["__meta_rollstream_role"]) == (
        run_name,
        "exporter",
    )


THERE = WorkerInfo(worker_id="generator-a", role="generator", host="h", pid=1, address="h:1")
ITSELF = WorkerInfo(worker_id="exporter-a", role="exporter", host="h", pid=2, address="h:2")


def addresses(targets: Targets) -> list[str]:
    answer = targets.answer()
    assert isinstance(answer, list)
    return [item["targets"][0] for item in answer]  # type: ignore[call-overload, index]


async def test_workers_that_are_lost_are_no_targets_and_without_redis_nobody_knows(redis: Redis, keys: Keys) -> None:
    targets = Targets(keys.run, "exporter-a")
    assert targets.answer() is None
    lost = replace(THERE, worker_id="generator-b", address="h:3", is_alive=False)
    silent = replace(THERE, worker_id="generator-c", address="")
    targets.show(replace(await collect(redis, keys), workers=(THERE, lost, silent)))
    assert targets.answer() == [
        {
            "targets": ["h:1"],
            "labels": {
                "__meta_rollstream_run": keys.run,
                "__meta_rollstream_role": "generator",
                "__meta_rollstream_worker": "generator-a",
                "__meta_rollstream_host": "h",
            },
        }
    ]
    targets.show(None)
    assert targets.answer() is None


async def test_an_exporter_that_leaves_tells_prometheus_who_stays(redis: Redis, keys: Keys) -> None:
    now = [100.0]
    targets = Targets(keys.run, "exporter-a", clock=lambda: now[0])
    draining = replace(THERE, worker_id="generator-b", address="h:3", status={"state": "draining"})
    status = replace(await collect(redis, keys), workers=(THERE, draining, ITSELF))
    targets.show(status)
    assert targets.leave(0.5) == 0, "nobody has ever asked"
    targets = Targets(keys.run, "exporter-a", clock=lambda: now[0])
    targets.show(status)
    for now[0] in (100.0, 103.0, 103.2, 106.2, 106.3):
        assert addresses(targets) == ["h:1", "h:3", "h:2"]
    assert targets.leave(0.5) == 7.5, "twice the longest time between two of the last questions, and one more second"
    assert addresses(targets) == ["h:1"]
    assert not targets.said_goodbye.is_set(), "who was asked to leave at the same time may not have said so yet"
    now[0] = 106.8
    assert addresses(targets) == ["h:1"]
    assert targets.said_goodbye.is_set()
    targets.show(replace(status, stop_reason="all steps are done"))
    assert addresses(targets) == []
    hurried = Targets(keys.run, "exporter-a", clock=lambda: now[0])
    for now[0] in (200.0, 200.5):
        hurried.answer()
    assert hurried.leave(0.5) == 5.5, "a busy machine may be late by more than what is usual"


def test_blocked_run_is_named_in_the_log_within_a_minute_and_again_each_minute() -> None:
    lines = Lines()
    watch = exporter.BlockedWatch(lines)  # type: ignore[arg-type]
    blocked = Limit(stage="generator", reason="no generator is alive", is_blocked=True)
    for now in range(0, 100, 2):
        watch.look(blocked, float(now))
    assert [(event, fields["seconds"]) for event, fields in lines.events] == [("run_blocked", 10), ("run_blocked", 70)]
    watch.look(Limit(stage="trainer", reason="busy"), 101.0)
    assert lines.events[-1][0] == "run_moves_again"


def test_a_short_stop_is_not_worth_a_word() -> None:
    lines = Lines()
    watch = exporter.BlockedWatch(lines)  # type: ignore[arg-type]
    for now, is_blocked in [(0.0, True), (8.0, True), (9.0, False), (11.0, True), (20.0, True)]:
        watch.look(Limit(stage="scorer", reason="no scorer is alive", is_blocked=is_blocked), now)
    assert lines.events == []
