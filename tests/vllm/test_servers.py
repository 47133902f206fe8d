"""A real vLLM server, started as its users start it: tokens, logprobs, new weights, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import LoraSettings, ModelSettings, WeightSettings
from pipeline.engines.openai import OpenAiEngine
from pipeline.errors import ConfigError, EngineError, EngineLostError, WeightError
from pipeline.messages import Completion, PromptGroup
from pipeline.weights import Endpoints, WeightPublisher, WeightState
from tests.engines.conftest import group_of, load, shifted, state_of
from tests.tiny import make_tiny_model
from tests.vllm.answers import assert_drawn_by, assert_logprobs_of, assert_serves, config_for
from tests.vllm.history import stepped
from tests.vllm.server import Server

pytest.importorskip("aiohttp")
from pipeline.engines.openai_server import RemoteServer

LORA = LoraSettings(rank=4)


@pytest.fixture(scope="module")
def model(model_path: Path) -> ModelSettings:
    """What the server serves."""
    return ModelSettings(path=str(model_path))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """All that were started, the last of which may run; killed in the end."""
    yield (started := [])
    for server in started:
        server.kill()


@pytest.fixture
def server(servers: list[Server], model: ModelSettings, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """One for all tests, and another after one that killed it."""
    if not servers or not servers[-1].is_running:
        servers.append(Server(model, tmp_path_factory.mktemp("server") / "log"))
        servers[-1].wait_until_healthy()
    return servers[-1]


@pytest.fixture
async def engine(server: Server, model: ModelSettings) -> AsyncIterator[OpenAiEngine]:
    """In front of the server, which serves the model's own weights as version 0."""
    started = OpenAiEngine(config_for(model, server.url))
    try:
        await started.start()
        await started.apply_weights(state_of(load(model), 0))
        yield started
    finally:
        await started.close()


async def test_logprobs_are_the_trainers_before_and_after_updates(engine: OpenAiEngine, model: ModelSettings) -> None:
    trainer = load(model)
    for version in range(3):
        if version:
            pause_s = await engine.apply_weights(state_of(shifted(trainer, 0.05, seed=version), version))
            assert 0 < pause_s < 10
        assert engine.weight_version == version
        group = group_of([4, 5, 6], ordinal=version, temperature=0.8, group_size=6)
        completions = await engine.generate(group)
        assert len({tuple(completion.token_ids.tolist()) for completion in completions}) > 1
        for completion in completions:
            assert set(completion.token_versions) == {version}
            assert_drawn_by(trainer, group, completion)


async def test_adapters_are_merged_into_what_the_server_serves(server: Server, model: ModelSettings) -> None:
    trainer = load(model, LORA)
    engine = OpenAiEngine(config_for(model, server.url, lora=LORA))
    try:
        await engine.start()
        for version in range(2):
            await engine.apply_weights(state_of(stepped(trainer, seed=version, amount=0.05), version))
            group = group_of([4, 5, 6], ordinal=version, temperature=0.8)
            for completion in await engine.generate(group):
                assert set(completion.token_versions) == {version}
                assert_drawn_by(trainer, group, completion)
    finally:
        await engine.close()


async def test_the_same_group_is_completed_in_the_same_way(engine: OpenAiEngine) -> None:
    first, again = [await engine.generate(group_of([4, 5, 6], ordinal=3)) for _ in range(2)]
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]


async def test_sequences_in_flight_go_on_and_say_which_weights_drew_which_token(
    engine: OpenAiEngine, model: ModelSettings
) -> None:
    trainers = [load(model)]
    crossed: list[tuple[PromptGroup, Completion]] = []
    async with asyncio.timeout(120):
        while not crossed:  # on a busy machine nothing may be in flight at the very instant of an update
            trainers.append(shifted(load(model), 0.05, seed=len(trainers)))
            crossed = await crossing(engine, state_of(trainers[-1], len(trainers) - 1))
    for group, completion in crossed:
        num_old = completion.spans[1].first_token
        head = dataclasses.replace(
            completion,
            token_ids=completion.token_ids[:num_old],
            generator_logprobs=completion.generator_logprobs[:num_old],
        )
        assert_drawn_by(trainers[completion.spans[0].weight_version], group, head)


async def crossing(engine: OpenAiEngine, new: WeightState) -> list[tuple[PromptGroup, Completion]]:
    """Completions that were in flight when the next version was applied."""
    is_applied = asyncio.Event()
    completions: list[tuple[PromptGroup, Completion]] = []

    async def generate_until_applied(number: int) -> None:
        for ordinal in itertools.count(number, 8):
            group = group_of([4 + number, 5], ordinal=ordinal, max_tokens=120, group_size=4, temperature=0.5)
            completions.extend((group, completion) for completion in await engine.generate(group))
            if is_applied.is_set():
                return

    before = engine.num_tokens_generated
    tasks = [asyncio.create_task(generate_until_applied(number)) for number in range(8)]
    while engine.num_tokens_generated < before + 64:  # noqa: ASYNC110  the server counts
        await asyncio.sleep(0.001)
    await engine.apply_weights(new)
    is_applied.set()
    await asyncio.gather(*tasks)
    both = [new.weight_version - 1, new.weight_version]
    return [(group, item) for group, item in completions if [span.weight_version for span in item.spans] == both]


async def test_weights_that_do_not_fit_leave_the_old_ones_serving(engine: OpenAiEngine, model: ModelSettings) -> None:
    state = state_of(shifted(load(model), 0.1), 1)
    name, *_ = state.tensors
    tensors = {key: tensor for key, tensor in state.tensors.items() if key != name}
    with pytest.raises(WeightError, match=re.escape(name)):
        await engine.apply_weights(dataclasses.replace(state, tensors=tensors))
    group = group_of([4, 5, 6])
    for completion in await engine.generate(group):
        assert set(completion.token_versions) == {0}
        assert_drawn_by(load(model), group, completion)


async def test_a_token_that_the_model_does_not_have_is_an_error_at_once(engine: OpenAiEngine) -> None:
    with pytest.raises(EngineError, match="out of vocabulary"):
        await engine.generate(group_of([4, 60000], group_size=1))
    assert engine.weight_version == 0


async def test_cancelling_a_group_ends_its_sequences_in_the_server(engine: OpenAiEngine, server: Server) -> None:
    before = engine.num_tokens_generated
    task = asyncio.create_task(engine.generate(group_of([4, 5], group_size=16, max_tokens=120, temperature=0.5)))
    async with asyncio.timeout(30):
        while engine.num_tokens_generated == before:  # noqa: ASYNC110  the server counts
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while await asyncio.to_thread(server.num_running):  # noqa: ASYNC110  the server counts
            await asyncio.sleep(0.05)
    assert engine.num_unfinished_seqs == 0


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapter"])
async def test_workers_that_share_no_memory_fetch_the_weights_themselves(
    server: Server, model: ModelSettings, lora: LoraSettings | None
) -> None:
    trainer = stepped(load(model, lora), seed=3, amount=0.05)
    remote = RemoteServer(server.url, config_for(model, lora=lora), context=128)
    nothing = {"path": "/proc/self/fd/0", "size": 1, "tensors": [["proof", "uint8", [1], 0, 1]]}
    settings = WeightSettings(poll_s=0.2)
    with WeightPublisher(settings) as publisher:
        endpoints = publisher.start()

        async def where() -> Endpoints:
            return endpoints

        publisher.publish(state_of(trainer, 11))
        try:
            async with asyncio.timeout(60):
                await remote.connect(nothing, proof="00", is_to_own=True)
                assert remote.is_local is False
                assert await remote.fetch(10, where, {"poll_s": 0.2}) == 11
                publisher.publish(state_of(stepped(trainer, seed=4, amount=0.05), 12))
                assert await remote.fetch(11, where, {"poll_s": 0.2}) == 12
                await remote.update(12, {"pulled": 12})
                sampling = {"max_tokens": 20, "temperature": 1.0, "logprobs": 0, "seed": 1}
                segment = await remote.complete([4, 5, 6], sampling, remote.new_answer())
        finally:
            await remote.close()
    assert segment.spans == [(12, 0)]
    assert_logprobs_of(trainer, [4, 5, 6], segment.token_ids, segment.logprobs)


def test_another_trainer_gives_weights_as_the_documentation_says(server: Server, model: ModelSettings) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    names: dict[str, Any] = {"post": server.post}
    for body in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(body, names)
    trainer = shifted(load(model), 0.05, seed=6)
    names["give"](trainer, 31)
    assert_serves(server, trainer, "31")
    with WeightPublisher(WeightSettings(poll_s=0.2)) as publisher:
        endpoints = publisher.start()
        publisher.publish(state_of(shifted(trainer, 0.05, seed=7), 32))
        update_info = names["let_fetch"](endpoints, 32)
    server.post("/pause?mode=keep")
    server.post("/start_weight_update")
    server.post("/update_weights", {"update_info": update_info})
    server.post("/finish_weight_update", {"weight_version": "32"})
    server.post("/resume")
    assert_serves(server, trainer, "32")


async def test_an_update_that_was_broken_off_is_mended_by_the_next(
    engine: OpenAiEngine, server: Server, model: ModelSettings
) -> None:
    await asyncio.to_thread(server.post, "/pause?mode=keep")
    await asyncio.to_thread(server.post, "/start_weight_update")
    trainer = shifted(load(model), 0.05, seed=5)
    await engine.apply_weights(state_of(trainer, 2))
    group = group_of([4, 5, 6])
    for completion in await engine.generate(group):
        assert set(completion.token_versions) == {2}
        assert_drawn_by(trainer, group, completion)


async def test_two_generators_never_give_one_server_weights(
    engine: OpenAiEngine, server: Server, model: ModelSettings
) -> None:
    other = OpenAiEngine(config_for(model, server.url))
    try:
        await other.start()
        applying = asyncio.create_task(other.apply_weights(state_of(shifted(load(model), 0.1), 9)))
        group = group_of([4, 5, 6])
        for completion in await engine.generate(group):
            assert set(completion.token_versions) == {0}
            assert_drawn_by(load(model), group, completion)
        assert not applying.done()
        await engine.close()
        async with asyncio.timeout(30):
            await applying
        assert json.loads(server.get("/weight_info")) == {"weight_version": "9"}
    finally:
        await other.close()


async def test_a_server_that_someone_else_relabelled_gets_the_weights_anew(
    engine: OpenAiEngine, server: Server, model: ModelSettings
) -> None:
    await asyncio.to_thread(server.post, "/update_weight_version", {"new_version": "theirs"})
    group = group_of([4, 5, 6])
    for completion in await engine.generate(group):
        assert set(completion.token_versions) == {0}
        assert_drawn_by(load(model), group, completion)
    assert json.loads(server.get("/weight_info")) == {"weight_version": "0"}


async def test_a_context_longer_than_the_servers_is_refused_with_the_flag(server: Server, tmp_path: Path) -> None:
    longer = ModelSettings(path=str(make_tiny_model(tmp_path, hidden_size=128, max_context=256)))
    engine = OpenAiEngine(config_for(longer, server.url))
    with pytest.raises(ConfigError, match="--max-model-len 256"):
        await engine.start()
    await engine.close()


async def generate_for_ever(engine: OpenAiEngine) -> None:
    while True:
        await engine.generate(group_of([4, 5], group_size=16, max_tokens=120, temperature=0.5))


async def test_a_killed_server_is_reported(server: Server, model: ModelSettings) -> None:
    engine = OpenAiEngine(config_for(model, server.url, stall_s=2.0))
    try:
        await engine.start()
        await engine.apply_weights(state_of(load(model), 20))
        before = engine.num_tokens_generated

        task = asyncio.create_task(generate_for_ever(engine))
        async with asyncio.timeout(60):
            while engine.num_tokens_generated == before:  # noqa: ASYNC110  the server counts
                await asyncio.sleep(0.001)
            await asyncio.to_thread(server.kill)
            with pytest.raises(EngineLostError, match=re.escape(server.url)):
                await task
        assert engine.weight_version is None
    finally:
        await engine.close()
