"""New weights on servers that refuse them, end, restart or come late: which of them go on generating."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path

import pytest
import zmq

from pipeline.config import WeightSettings
from pipeline.engines.openai import OpenAiEngine
from pipeline.engines.vllm_pull import WeightPull
from pipeline.errors import WeightError
from pipeline.messages import VersionSpan
from pipeline.weights import WeightPublisher
from tests.engines.conftest import Serve, Start, group_of, load, openai_config, state_of
from tests.engines.stand_in import SERVER_INFO, fine
from tests.weights.states import at, same, until

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
    async with asyncio.timeout(180):
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
    async with asyncio.timeout(180):
        await engine.apply_weights(state_of(load(tiny_model), 1))
        await engine.generate(group_of([4, 5], group_size=4))
    assert engine.weight_version == 1
    assert bad.num_requests == 0


async def test_an_update_that_takes_long_is_waited_for(serve: Serve, start: Start, tiny_model) -> None:
    server = serve(fine)
    engine = await start(server)
    server.ignores = {"/update_weights"}
    applying = asyncio.create_task(engine.apply_weights(state_of(load(tiny_model), 1)))
    async with asyncio.timeout(180):
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
    async with asyncio.timeout(180):
        await applying
    assert engine.weight_version == 0


@pytest.mark.parametrize("guard", ["curve", "shared_key"])
async def test_servers_that_fetch_weights_for_themselves_show_the_keys_that_the_trainer_asks_for(
    serve: Serve, tiny_model, tmp_path, guard: str
) -> None:
    secret, client, shared = tmp_path / "server.key", tmp_path / "client.key", tmp_path / "shared.key"
    public, client_public = (new_key(path) for path in (secret, client))
    shared.write_text(secrets.token_hex(32))
    theirs, ours = {
        "curve": (
            {"server_secret_key_file": str(secret), "allowed_keys": [client_public]},
            {"server_public_key": public, "client_secret_key_file": str(client)},
        ),
        "shared_key": ({"shared_key_file": str(shared)}, {"shared_key_file": str(shared)}),
    }[guard]
    server, state = serve(fine), state_of(load(tiny_model), 3)
    server.pull = WeightPull()
    config = openai_config(tiny_model, server.url)
    config = config.model_copy(update={"weights": WeightSettings.model_validate(ours | {"poll_s": 0.05})})
    with WeightPublisher(WeightSettings.model_validate(theirs)) as publisher, contextlib.closing(server.pull):
        engine = OpenAiEngine(config, resolve=at(publisher.start()))
        publisher.publish(state)
        try:
            await engine.start()
            async with asyncio.timeout(180):
                await engine.apply_weights(state)
            assert engine.weight_version == 3
            assert same(server.pull.take(3), state)
        finally:
            await engine.close()


async def test_a_fetch_that_is_begun_anew_forgets_what_was_wrong_with_the_last_one(tmp_path: Path) -> None:
    key, nowhere = tmp_path / "shared.key", {"announce": "tcp://127.0.0.1:9", "tiles": "tcp://127.0.0.1:9"}
    with contextlib.closing(WeightPull()) as pull:
        pull.follow(nowhere | {"session": ""}, {"shared_key_file": str(key)}, newer_than=-1)
        await until(lambda: "shared_key_file" in pull.status["problem"])
        key.write_text(secrets.token_hex(32))
        pull.follow(nowhere | {"session": ""}, {"shared_key_file": str(key)}, newer_than=-1)
        await until(lambda: not pull.status["problem"])


def new_key(path: Path) -> str:
    """The public key of a secret in that file."""
    public, secret = zmq.curve_keypair()
    path.write_bytes(secret)
    return public.decode()
