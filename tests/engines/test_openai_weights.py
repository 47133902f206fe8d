"""New weights on servers that refuse them, end, restart or come late: which of them go on generating."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.errors import WeightError
from pipeline.messages import VersionSpan
from tests.engines.conftest import Serve, Start, group_of, load, state_of
from tests.engines.stand_in import SERVER_INFO, fine

pytest.importorskip("aiohttp")


async def test_tokens_of_weights_that_were_not_given_are_never_used(serve: Serve, start: Start) -> None:
    server = serve(fine)
    engine = await start(server)
    server.label = "default"  # as after a restart
    (completion,) = await engine.generate(group_of([4, 5], group_size=1))
    assert completion.spans == (VersionSpan(weight_version=0, first_token=0),)
    assert server.label == "0"
    assert server.num_requests == 2


async def test_a_server_that_did_not_take_the_weights_is_left_out_until_it_has(
    serve: Serve, start: Start, tiny_model
) -> None:
    good, bad = serve(fine), serve(fine)
    engine = await start(good, bad)
    bad.refuses = {"/update_weights"}
    await engine.apply_weights(state_of(load(tiny_model), 1))
    assert engine.weight_version == 1
    await engine.generate(group_of([4, 5], group_size=4))
    assert bad.num_requests == 0
    bad.refuses = set()
    async with asyncio.timeout(60):
        while bad.label != "1":  # noqa: ASYNC110  it is a thread that changes it
            await asyncio.sleep(0.02)
        while not bad.num_requests:
            await engine.generate(group_of([4, 5], group_size=4))
    assert "/resume" in bad.paths


async def test_a_server_whose_engine_ended_in_an_update_holds_up_no_other(
    serve: Serve, start: Start, tiny_model
) -> None:
    good, bad = serve(fine), serve(fine)
    engine = await start(good, bad)
    bad.ignores, bad.is_healthy = {"/update_weights"}, False
    async with asyncio.timeout(60):
        await engine.apply_weights(state_of(load(tiny_model), 1))
        await engine.generate(group_of([4, 5], group_size=4))
    assert engine.weight_version == 1
    assert bad.num_requests == 0


async def test_an_update_that_takes_long_is_waited_for(serve: Serve, start: Start, tiny_model) -> None:
    server = serve(fine)
    engine = await start(server)
    server.ignores = {"/update_weights"}
    applying = asyncio.create_task(engine.apply_weights(state_of(load(tiny_model), 1)))
    async with asyncio.timeout(60):
        while server.paths.count("/health") < 2:  # noqa: ASYNC110  it is a thread that changes it
            await asyncio.sleep(0.02)
        server.is_over.set()
        await applying
    assert engine.weight_version == 1


async def test_weights_that_no_server_takes_are_an_error(serve: Serve, start: Start, tiny_model) -> None:
    server = serve(fine)
    engine = await start(server)
    server.refuses = {"/update_weights"}
    with pytest.raises(WeightError, match="it does not fit"):
        await engine.apply_weights(state_of(load(tiny_model), 1))


async def test_weights_wait_for_a_server_that_is_not_there_yet(serve: Serve, start: Start, tiny_model) -> None:
    server = serve(fine)
    server.refuses = {"/init_weight_transfer_engine"}
    server.info = {}  # it is starting
    engine = await start(server, has_weights=False)
    applying = asyncio.create_task(engine.apply_weights(state_of(load(tiny_model), 0)))
    await asyncio.sleep(0)
    server.info, server.refuses = SERVER_INFO, set()
    async with asyncio.timeout(60):
        await applying
    assert engine.weight_version == 0
