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

import numpy as np
import pytest
import torch

from pipeline.config import Config, ModelSettings, WeightSettings
from pipeline.engines.openai import OpenAiEngine
from pipeline.errors import ConfigError, EngineError, EngineLostError, WeightError
from pipeline.messages import Completion, PromptGroup
from pipeline.weights import Endpoints, WeightPublisher
from tests.engines.conftest import group_of, load, plain_logits, shifted, state_of
from tests.tiny import make_tiny_model
from tests.vllm.server import Server

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def model(model_path: Path) -> ModelSettings:
    """What the server serves."""
    return ModelSettings(path=str(model_path))


@pytest.fixture(scope="module")
def server(model: ModelSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts once for all tests, and is killed in the end."""
    started = Server(model, tmp_path_factory.mktemp("server") / "log")
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.kill()


def config_for(model: ModelSettings, *urls: str, **openai: object) -> Config:
    generation = {"engine": "openai", "openai": {"urls": list(urls), "stall_s": 20.0} | openai}
    return Config.model_validate({"model": model.model_dump(), "generation": generation})


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


def assert_drawn_by(trainer: torch.nn.Module, group: PromptGroup, completion: Completion) -> None:
    """Logprobs are those of a plain forward pass of the trainer's model."""
    ids = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
    scaled = plain_logits(trainer, group, completion) / group.sampling.temperature
    expected = scaled.log_softmax(-1).gather(1, ids)[:, 0].numpy()
    np.testing.assert_allclose(completion.generator_logprobs, expected, atol=1e-4)


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


async def test_the_same_group_is_completed_in_the_same_way(engine: OpenAiEngine) -> None:
    first, again = [await engine.generate(group_of([4, 5, 6], ordinal=3)) for _ in range(2)]
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]


async def test_sequences_in_flight_go_on_and_say_which_weights_drew_which_token(
    engine: OpenAiEngine, model: ModelSettings
) -> None:
    old, new = load(model), state_of(shifted(load(model), 0.05), 7)
    is_applied = asyncio.Event()
    completions: list[tuple[PromptGroup, Completion]] = []

    async def generate_until_applied(number: int) -> None:
        """However long the update takes to begin, something is in flight then."""
        for ordinal in itertools.count(number, 8):
            group = group_of([4 + number, 5], ordinal=ordinal, max_tokens=120, group_size=4, temperature=0.5)
            completions.extend((group, completion) for completion in await engine.generate(group))
            if is_applied.is_set():
                return

    before = engine.num_tokens_generated
    tasks = [asyncio.create_task(generate_until_applied(number)) for number in range(8)]
    async with asyncio.timeout(60):
        while engine.num_tokens_generated < before + 64:  # noqa: ASYNC110  the server counts
            await asyncio.sleep(0.001)
    await engine.apply_weights(new)
    is_applied.set()
    await asyncio.gather(*tasks)
    crossed = [(group, c) for group, c in completions if [span.weight_version for span in c.spans] == [0, 7]]
    assert crossed
    for group, completion in crossed:
        num_old = completion.spans[1].first_token
        head = dataclasses.replace(
            completion,
            token_ids=completion.token_ids[:num_old],
            generator_logprobs=completion.generator_logprobs[:num_old],
        )
        assert_drawn_by(old, group, head)


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


async def test_workers_that_share_no_memory_fetch_the_weights_themselves(server: Server, model: ModelSettings) -> None:
    from pipeline.engines.openai_server import RemoteServer

    trainer = shifted(load(model), 0.05, seed=3)
    remote = RemoteServer(server.url, config_for(model), context=128)
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
                publisher.publish(state_of(shifted(trainer, 0.05, seed=4), 12))
                assert await remote.fetch(11, where, {"poll_s": 0.2}) == 12
                await remote.update(12, {"pulled": 12})
                segment = await remote.complete(
                    [4, 5, 6], {"max_tokens": 20, "temperature": 1.0, "logprobs": 0, "seed": 1}
                )
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


def assert_serves(server: Server, trainer: torch.nn.Module, label: str) -> None:
    """What the server answers is drawn from the trainer's weights, and says so."""
    sampling = {"max_tokens": 20, "logprobs": 0, "seed": 1}
    request = {"token_ids": [4, 5, 6], "cache_salt": label, "sampling_params": sampling}
    (choice,) = server.post("/inference/v1/generate", request)["choices"]
    assert [span["version"] for span in choice["weight_versions"]] == [label]
    assert_logprobs_of(trainer, [4, 5, 6], choice["token_ids"], [x["logprob"] for x in choice["logprobs"]["content"]])


def assert_logprobs_of(trainer: torch.nn.Module, prompt: list[int], drawn: list[int], logprobs: list[float]) -> None:
    """At temperature 1."""
    ids = torch.tensor([prompt + drawn])
    with torch.no_grad():
        logits = trainer(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)


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


async def test_a_killed_server_is_reported(server: Server, model: ModelSettings) -> None:
    engine = OpenAiEngine(config_for(model, server.url, stall_s=2.0))
    try:
        await engine.start()
        await engine.apply_weights(state_of(load(model), 20))
        before = engine.num_tokens_generated
        task = asyncio.create_task(engine.generate(group_of([4, 5], group_size=16, max_tokens=120, temperature=0.5)))
        async with asyncio.timeout(30):
            while engine.num_tokens_generated == before:  # noqa: ASYNC110  the server counts
                await asyncio.sleep(0.001)
        await asyncio.to_thread(server.kill)
        with pytest.raises(EngineLostError, match=re.escape(server.url)):
            await task
        assert engine.weight_version is None
    finally:
        await engine.close()
