"""Engines on tiny models, and the groups they are given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from pipeline.config import Config, GenerationSettings, LoraSettings, ModelSettings
from pipeline.engines.openai import OpenAiEngine
from pipeline.engines.transformers import TransformersEngine
from pipeline.messages import Completion, PromptGroup, SamplingParams, UnfinishedCompletion
from pipeline.models.loading import load_model
from pipeline.models.weights import export_weights, weight_kind
from pipeline.weights import WeightState
from tests.engines.stand_in import Handler, StandIn, stand_in
from tests.tiny import make_tiny_model

MakeEngine = Callable[..., Awaitable[TransformersEngine]]
Serve = Callable[[Callable[[Handler, int], None]], StandIn]
Start = Callable[..., Awaitable[OpenAiEngine]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    """A tiny Llama on disk."""
    return ModelSettings(path=str(make_tiny_model(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture
async def make_engine(tiny_model: ModelSettings) -> AsyncIterator[MakeEngine]:
    """Starts an engine that serves the model's own weights as version 0; closes all at the end."""
    engines: list[TransformersEngine] = []

    async def make(
        *, model: ModelSettings = tiny_model, lora: LoraSettings | None = None, seed: int = 0, **generation: object
    ) -> TransformersEngine:
        settings = GenerationSettings.model_validate({"device": "cpu", "dtype": "float32"} | generation)
        engine = TransformersEngine(model, lora or LoraSettings(), settings, seed=seed)
        engines.append(engine)
        await engine.start()
        await engine.apply_weights(state_of(load(model, lora, seed=seed), 0))
        return engine

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts stand-ins; ends all of them at the end."""
    with ExitStack() as stack:
        yield lambda behave: stack.enter_context(stand_in(behave))


@pytest.fixture
async def start(tiny_model: ModelSettings) -> AsyncIterator[Start]:
    """Starts an engine in front of servers that serves version 0."""
    engines: list[OpenAiEngine] = []

    async def make(*servers: StandIn, has_weights: bool = True, **openai: object) -> OpenAiEngine:
        engine = OpenAiEngine(openai_config(tiny_model, *[server.url for server in servers], **openai))
        engines.append(engine)
        await engine.start()
        if has_weights:
            await engine.apply_weights(state_of(load(tiny_model), 0))
        return engine

    yield make
    for engine in engines:
        await engine.close()


def openai_config(model: ModelSettings, *urls: str, **openai: object) -> Config:
    generation = {"engine": "openai", "openai": {"urls": list(urls), "stall_s": 60.0} | openai}
    return Config.model_validate({"model": model.model_dump(), "generation": generation})


def load(model: ModelSettings, lora: LoraSettings | None = None, *, seed: int = 0) -> torch.nn.Module:
    """The trainer's copy of a model."""
    return load_model(
        model, lora or LoraSettings(), device=torch.device("cpu"), dtype=torch.float32, seed=seed, trainable=True
    ).eval()


def state_of(model: torch.nn.Module, weight_version: int) -> WeightState:
    """What a trainer would publish."""
    return WeightState(weight_version=weight_version, kind=weight_kind(model), tensors=export_weights(model))


def shifted(model: torch.nn.Module, amount: float, *, seed: int = 0) -> torch.nn.Module:
    """The same model after a step in a random direction, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return model


def group_of(ids: list[int], *, ordinal: int = 0, **sampling: object) -> PromptGroup:
    """A prompt group with these token ids."""
    settings: dict[str, object] = {"group_size": 4, "max_tokens": 20, "seed": 7} | sampling
    return PromptGroup(
        group_id=f"{ordinal:08d}",
        ordinal=ordinal,
        dataset_index=ordinal,
        epoch=0,
        prompt="",
        prompt_token_ids=np.array(ids, dtype=np.uint32),
        columns={},
        sampling=SamplingParams(**settings),  # type: ignore[arg-type]
        fed_version=0,
        min_version=0,
    )


@torch.no_grad()
def plain_logits(
    model: torch.nn.Module, prompt: PromptGroup, completion: Completion | UnfinishedCompletion
) -> torch.Tensor:
    """Logits that drew each token, [T, V], from one forward pass over the whole sequence."""
    ids = torch.tensor([prompt.prompt_token_ids.tolist() + completion.token_ids.tolist()])
    logits: torch.Tensor = model(input_ids=ids).logits[0, len(prompt.prompt_token_ids) - 1 : -1]
    return logits.double()
