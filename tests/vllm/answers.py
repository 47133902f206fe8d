"""What a real server answers, compared with the trainer's model, and the settings to ask it."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.config import Config, LoraSettings, ModelSettings
from pipeline.messages import Completion, PromptGroup, UnfinishedCompletion
from tests.engines.conftest import plain_logits
from tests.vllm.server import Server


def config_for(model: ModelSettings, *urls: str, lora: LoraSettings | None = None, **openai: object) -> Config:
    generation = {"engine": "openai", "merge_lora": lora is not None}
    generation["openai"] = {"urls": list(urls), "stall_s": 20.0} | openai
    settings = {"model": model.model_dump(), "generation": generation, "lora": (lora or LoraSettings()).model_dump()}
    return Config.model_validate(settings)


def assert_drawn_by(
    trainer: torch.nn.Module,
    group: PromptGroup,
    completion: Completion | UnfinishedCompletion,
    *,
    tolerance: float = 1e-4,
) -> None:
    """Logprobs are those of a plain forward pass of the trainer's model."""
    ids = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
    scaled = plain_logits(trainer, group, completion) / group.sampling.temperature
    expected = scaled.log_softmax(-1).gather(1, ids)[:, 0].numpy()
    np.testing.assert_allclose(completion.generator_logprobs, expected, atol=tolerance)


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
