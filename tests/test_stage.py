"""A stage takes on no more than its work has room for; busy is the time in which anything was in work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pipeline.keys import Stream
from pipeline.settings.files import load_config
from pipeline.streams import Entry, Lease
from pipeline.wire import encode
from pipeline.worker.context import WorkerContext
from pipeline.worker.lifecycle import run_worker
from pipeline.worker.stage import BusyClock, Stage
from tests.engines.test_scripted import started
from tests.groups import make_prompt
from workers.generator import GenerationWork


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


class TwoAtOnce:
    """Work that never ends, with room for two groups."""

    def __init__(self) -> None:
        self.num_in_work = 0
        self.num_asked_when_full = 0

    def capacity(self) -> int:
        self.num_asked_when_full += self.num_in_work >= 2
        return 2 - self.num_in_work

    async def process(self, lease: Lease) -> Entry:
        self.num_in_work += 1
        await asyncio.Event().wait()
        raise AssertionError


async def feed(context: WorkerContext, number: int, *, min_version: int = 0) -> None:
    prompts = [make_prompt(ordinal, version=min_version, min_version=min_version) for ordinal in range(number)]
    entries = [Entry(group_id=prompt.group_id, weight_version=0, payload=encode(prompt)) for prompt in prompts]
    await context.streams.feed(entries, limit=number)


def run_body(url: str, run: str, body: Callable[[WorkerContext], Awaitable[None]]) -> None:
    words = [f"run.name='{run}'", f"redis.url='{url}'", "generation.engine='scripted'", "generation.group_size=2"]
    config = load_config([], environ={}, overrides=[*words, "generation.max_num_seqs=4"])
    assert run_worker("generator", config, body) == 0


@pytest.mark.usefixtures("logging_as_before")
def test_a_stage_claims_no_more_than_there_is_room_for(valkey_url: str, run_name: str) -> None:
    seen: list[tuple[int, int]] = []

    async def body(context: WorkerContext) -> None:
        await feed(context, 10)
        work = TwoAtOnce()
        stage = asyncio.create_task(Stage(context, source=Stream.PROMPTS, work=work).run())
        while work.num_asked_when_full < 2:  # noqa: ASYNC110 - the work sets no event
            await asyncio.sleep(0.001)
        depth = (await context.streams.depths())[Stream.PROMPTS]
        seen.append((depth.pending, depth.backlog))
        stage.cancel()

    run_body(valkey_url, run_name, body)
    assert seen == [(2, 8)]


@pytest.mark.usefixtures("logging_as_before")
def test_groups_that_wait_for_newer_weights_take_up_their_room_in_the_engine(valkey_url: str, run_name: str) -> None:
    seen: list[int] = []

    async def body(context: WorkerContext) -> None:
        await feed(context, 2, min_version=7)
        work = GenerationWork(context, await started(max_num_seqs=4))
        seen.append(work.capacity())
        leases = await context.streams.claim(Stream.PROMPTS, 2, block_s=5.0)
        tasks = [asyncio.create_task(work.process(lease)) for lease in leases]
        await asyncio.sleep(0)
        seen.append(work.capacity())
        for task in tasks:
            task.cancel()

    run_body(valkey_url, run_name, body)
    assert seen == [2, 0]
