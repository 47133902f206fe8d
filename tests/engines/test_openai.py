"""Servers that are slow, full, dead, silent or wrong: what becomes of the requests."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

import pytest

from pipeline.checks.config import check
from pipeline.config import Config
from pipeline.engines.openai import OpenAiEngine
from pipeline.engines.registry import create_engine
from pipeline.errors import ConfigError, EngineError, EngineLostError
from pipeline.messages import VersionSpan
from tests.engines.conftest import Serve, Start, group_of, openai_config
from tests.engines.stand_in import Handler, fine, hanging, slow

pytest.importorskip("aiohttp")


def test_the_engine_is_made_by_name(tiny_model) -> None:
    assert isinstance(create_engine(openai_config(tiny_model, "http://localhost:1/v1")), OpenAiEngine)


@pytest.mark.parametrize(
    ("urls", "more", "named"),
    [
        ([], {}, "generation.openai.urls is empty"),
        (["gpu1:8000"], {}, "http://host:port"),
        (["http://user:secret@gpu1:8000"], {}, "api_key_env"),
        (["http://gpu1:8000", "http://gpu1:8000/v1/"], {}, "twice"),
        (["http://gpu1:8000"], {"lora": {"rank": 4}}, "lora.rank"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_way_out(tiny_model, urls, more, named) -> None:
    config = openai_config(tiny_model, *urls).model_copy(update={"lora": Config.model_validate(more).lora})
    with pytest.raises(ConfigError, match=r"generation\.openai|lora") as caught:
        create_engine(config)
    assert named in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError) as checked:
        check(config)
    assert named in str(checked.value)


async def test_a_completion_carries_what_the_server_said(serve: Serve, start: Start) -> None:
    server = serve(fine)
    engine = await start(server)
    (completion,) = await engine.generate(group_of([4, 5], group_size=1))
    assert completion.token_ids.tolist() == [5, 6, 7]
    assert completion.generator_logprobs.tolist() == [-0.5] * 3
    assert completion.spans == (VersionSpan(weight_version=0, first_token=0),)
    assert engine.num_tokens_generated == 3
    assert engine.num_unfinished_seqs == 0


async def test_requests_go_to_the_server_that_has_the_fewest(serve: Serve, start: Start) -> None:
    servers = [serve(slow), serve(slow)]
    engine = await start(*servers)
    await engine.generate(group_of([4, 5], group_size=8))
    assert [server.num_requests for server in servers] == [4, 4]


async def test_a_server_that_is_full_is_asked_again(serve: Serve, start: Start) -> None:
    def full_at_first(handler: Handler, number: int) -> None:
        if number <= 2:
            handler.send(503, {"error": {"message": "too many requests", "code": 503}})
        else:
            handler.tokens([5, 6, 7])

    server = serve(full_at_first)
    engine = await start(server)
    (completion,) = await engine.generate(group_of([4, 5], group_size=1))
    assert len(completion) == 3
    assert server.num_requests == 3


async def test_a_request_that_is_refused_for_good_is_made_once(serve: Serve, start: Start) -> None:
    server = serve(lambda handler, number: handler.send(400, {"error": {"message": "no such token", "code": 400}}))
    engine = await start(server)
    with pytest.raises(EngineError, match="400: no such token"):
        await engine.generate(group_of([4, 5], group_size=1))
    assert server.num_requests == 1
    assert engine.weight_version == 0


async def test_a_server_that_keeps_failing_is_given_up_in_the_end(serve: Serve, start: Start, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.engines.openai_group._MAX_ATTEMPTS", 2)
    server = serve(lambda handler, number: handler.send(500, {"error": {"message": "out of memory", "code": 500}}))
    engine = await start(server)
    with pytest.raises(EngineError, match=r"out of memory.*attempt 2 of 2"):
        await engine.generate(group_of([4, 5], group_size=1))
    assert server.num_requests == 2


async def test_what_a_silent_server_was_asked_goes_to_another(serve: Serve, start: Start) -> None:
    silent, other = serve(hanging), serve(fine)
    engine = await start(silent, other, stall_s=2.0)
    async with asyncio.timeout(180):
        completions = await engine.generate(group_of([4, 5], group_size=4))
    assert [len(completion) for completion in completions] == [3] * 4
    assert silent.num_requests >= 1


def failing(handler: Handler, number: int) -> None:
    handler.send(500, {"error": {"message": "out of memory", "code": 500}})


@pytest.mark.parametrize("behave", [failing, hanging])
async def test_a_server_that_only_fails_at_tokens_is_left_out_until_it_has_drawn_one(
    serve: Serve, start: Start, behave: Callable[[Handler, int], None]
) -> None:
    bad, good = serve(behave), serve(fine)
    bad.passes_trials = False
    engine = await start(bad, good, stall_s=1.0)
    async with asyncio.timeout(60):
        while bad.num_trials < 2:
            await engine.generate(group_of([4, 5], group_size=4))
            await asyncio.sleep(0.01)
        num_asked = bad.num_requests
        await engine.generate(group_of([4, 5], group_size=8))
        assert bad.num_requests == num_asked
        bad.behave, bad.passes_trials = fine, True
        bad.is_over.set()
        while bad.num_requests == num_asked:
            await engine.generate(group_of([4, 5], group_size=4))


async def test_a_group_is_not_to_blame_for_servers_that_hang(
    serve: Serve, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engines.openai_group._MAX_ATTEMPTS", 1)
    server = serve(hanging)
    server.passes_trials = False
    engine = await start(server, stall_s=1.0)
    async with asyncio.timeout(60):
        with pytest.raises(EngineLostError, match=r"no server for 1 s: .*(got no token|gave none) in 1 s"):
            await engine.generate(group_of([4, 5], group_size=2))


async def test_what_fails_at_one_server_is_asked_of_another(serve: Serve, start: Start) -> None:
    """Although the one that fails at once always has the fewest requests."""

    def fails_every_third(handler: Handler, number: int) -> None:
        fine(handler, number) if number % 3 == 0 else failing(handler, number)

    bad, good = serve(fails_every_third), serve(slow)
    engine = await start(bad, good)
    completions = await engine.generate(group_of([4, 5], group_size=6))
    assert [len(completion) for completion in completions] == [3] * 6
    assert bad.num_requests <= 6, "each asked it once at the most"


async def test_a_slow_server_that_goes_on_is_not_taken_out(serve: Serve, start: Start) -> None:
    def drips(handler: Handler, number: int) -> None:
        handler.stream()
        for _ in range(6):
            handler.event([5])
            handler.server.is_over.wait(0.5)
        handler.event([], finish_reason="stop", weight_versions=[{"version": "0", "start": 0, "end": 6}])
        handler.close_connection = True

    server = serve(drips)
    engine = await start(server, stall_s=2.0)
    (completion,) = await engine.generate(group_of([4, 5], group_size=1))
    assert len(completion) == 6
    assert server.num_requests == 1


async def test_a_dead_server_is_survived_by_the_other(serve: Serve, start: Start) -> None:
    def dies(handler: Handler, number: int) -> None:
        handler.stream()
        handler.event([5])
        handler.server.socket.close()
        handler.close_connection = True

    asked: list[dict] = []

    def goes_on(handler: Handler, number: int) -> None:
        asked.append(handler.body)
        handler.tokens([5, 6, 7])

    dying, other = serve(dies), serve(goes_on)
    engine = await start(dying, other)
    completions = await engine.generate(group_of([4, 5], group_size=6))
    tokens = [completion.token_ids.tolist() for completion in completions]
    num_begun = sum(item == [5, 5, 6, 7] for item in tokens)
    assert sorted(tokens) == [[5, 5, 6, 7]] * num_begun + [[5, 6, 7]] * (6 - num_begun)
    assert num_begun >= 1
    assert sorted(len(body["token_ids"]) for body in asked) == [2] * (6 - num_begun) + [3] * num_begun
    assert {body["sampling_params"]["max_tokens"] + len(body["token_ids"]) for body in asked} == {22}
    assert all(completion.token_versions.tolist() == [0] * len(completion) for completion in completions)


async def test_an_engine_that_has_no_server_left_says_so_and_ends(serve: Serve, start: Start) -> None:
    server = serve(lambda handler, number: handler.server.server_close())
    engine = await start(server, stall_s=1.0)
    with pytest.raises(EngineLostError, match=f"no server for 1 s: {server.url}: "):
        await engine.generate(group_of([4, 5], group_size=1))
    assert engine.weight_version is None


async def test_a_sequence_that_was_broken_off_goes_on_from_its_tokens(serve: Serve, start: Start) -> None:
    asked: list[dict] = []

    def breaks_off(handler: Handler, number: int) -> None:
        asked.append(handler.body)
        handler.tokens([5, 6, 7], reason="abort" if number == 1 else "length")

    engine = await start(serve(breaks_off))
    (completion,) = await engine.generate(group_of([4, 5], group_size=1, max_tokens=6))
    assert completion.token_ids.tolist() == [5, 6, 7, 5, 6, 7]
    assert asked[1]["token_ids"] == [4, 5, 5, 6, 7]
    assert asked[1]["sampling_params"]["max_tokens"] == 3
    assert asked[0]["sampling_params"]["seed"] != asked[1]["sampling_params"]["seed"]


@pytest.mark.parametrize(
    ("section", "name", "value", "flag"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("model_config", "max_model_len", 64, "--max-model-len 128"),
        ("weight_transfer_config", "backend", "nccl", "--weight-transfer-config"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ],
)
async def test_a_server_that_lacks_something_is_refused_with_its_flag(
    serve: Serve, start: Start, section, name, value, flag
) -> None:
    server = serve(fine)
    server.info = copy.deepcopy(server.info)
    server.info[section][name] = value
    with pytest.raises(ConfigError, match=server.url) as caught:
        await start(server)
    assert flag in str(caught.value)


async def test_the_key_is_sent_and_never_shown(serve: Serve, start: Start, monkeypatch, caplog) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    server = serve(fine)
    await start(server, api_key_env="SOME_KEY")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret"}
    assert "s3cret" not in caplog.text


async def test_cancelling_a_group_closes_its_requests(serve: Serve, start: Start) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def notices(handler: Handler, number: int) -> None:
        handler.stream()
        loop.call_soon_threadsafe(asked.set)
        handler.connection.settimeout(60)
        if handler.rfile.read(1) == b"":
            loop.call_soon_threadsafe(gone.set)
        handler.close_connection = True

    engine = await start(serve(notices), stall_s=30)
    group = asyncio.create_task(engine.generate(group_of([4, 5], group_size=1)))
    async with asyncio.timeout(180):
        await asked.wait()
        group.cancel()
        await gone.wait()
    assert engine.num_unfinished_seqs == 0
