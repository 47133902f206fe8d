"""Host buffers: lent once, used again, and touched before they are needed."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest

from pipeline.weights import Endpoints, WeightPublisher, WeightSubscriber
from pipeline.weights.address_watch import unless_moved
from pipeline.weights.host_memory import HostPool
from pipeline.weights.memory import BufferPool, Pool, Warming
from tests.weights.drift import drifted
from tests.weights.states import FAST, at, next_within, same


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


@pytest.mark.parametrize("make_pool", [BufferPool, HostPool])
def test_a_buffer_that_was_touched_is_the_next_to_be_lent(make_pool: type[BufferPool | HostPool]) -> None:
    pool = make_pool(1 << 20)
    loan = pool.borrow()
    where = address(loan)
    warming = Warming(loan)
    del loan
    warming.end()
    assert address(pool.borrow()) == where
    warming.end()


def test_touching_stops_where_it_is_when_the_buffer_is_needed() -> None:
    pages = np.ones(64 << 20, dtype=np.uint8)
    warming = Warming(pages.data)
    warming.end()
    num_touched = int((pages[::4096] == 0).sum())
    assert not pages[::4096][:num_touched].any(), "from the beginning, without a gap"
    assert int(pages.sum()) == len(pages) - num_touched, "and a byte of each page"


async def test_what_broke_off_is_let_go_at_once_and_not_by_the_cycle_collector() -> None:
    pool, lent = BufferPool(1 << 20), []

    async def broken_off() -> None:
        loan = pool.borrow()
        lent.append(address(loan))
        raise TimeoutError

    endpoints = Endpoints(announce="", tiles="", session="")
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                await unless_moved(broken_off(), endpoints, at(endpoints))
    finally:
        gc.enable()
    assert len(set(lent)) == 1


async def test_a_receiver_of_patches_makes_two_buffers_and_no_more() -> None:
    made: list[int] = []

    class Counted(BufferPool):
        def borrow(self) -> memoryview:
            loan = super().borrow()
            made.append(address(loan))
            return loan

    def make_pool(num_bytes: int) -> Pool:
        return Counted(num_bytes)

    settings = FAST.model_copy(update={"encoding": "delta"})
    with WeightPublisher(settings) as publisher:
        async with WeightSubscriber(settings, resolve=at(publisher.start()), make_pool=make_pool) as subscriber:
            version = None
            for number in range(5):
                publisher.publish(drifted(number))
                state = await next_within(subscriber, version)
                assert same(state, drifted(number))
                version = number
                del state
    assert len(set(made)) == 2
