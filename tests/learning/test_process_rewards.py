"""Rewards of steps on their way from a score to the gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.config import AlgorithmSettings
from pipeline.messages import ScoredGroup
from pipeline.wire import decode, encode
from tests.learning.builders import Row, gradients, make_group, make_learner, plain_logprobs, tiny_llama

NAN = math.nan
IDS = ([4, 7, 5, 2], [6, 2, 3])
STEPS = ([NAN, 0.9, NAN, 0.1], [0.5, NAN, NAN])


@pytest.mark.parametrize("process", ["returns", "align"])
def test_step_rewards_reach_the_gradient_through_the_wire(process: str) -> None:
    model = tiny_llama()
    rows = [
        Row(
            token_ids=ids,
            reward=reward,
            token_rewards=steps,
            generator_logprobs=plain_logprobs(model, [1, 5, 3], ids).tolist(),
        )
        for ids, steps, reward in zip(IDS, STEPS, (1.0, 0.0), strict=True)
    ]
    group = decode(encode(make_group(rows)), ScoredGroup)
    settings = AlgorithmSettings.model_validate({"process": process, "process_weight": 0.7})

    loss, _ = make_learner(model, algorithm=settings).accumulate([group], trainer_version=0)
    ours = gradients(model)
    model.zero_grad()
    values = np.array([0.9, 0.1, 0.5])
    a, b, c = (values - values.mean()) / (values.std() + 1e-6)
    by_token = {
        "returns": ([a + b, a + b, b, b], [c, 0, 0]),
        "align": ([a - (a + b) / 2] * 2 + [b - (a + b) / 2] * 2, [0, 0, 0]),
    }[process]
    outcome = 0.5 / 0.500001
    terms = [
        -(sign * outcome + 0.7 * torch.tensor(part, dtype=torch.float64)) * plain_logprobs(model, [1, 5, 3], ids)
        for ids, part, sign in zip(IDS, by_token, (1, -1), strict=True)
    ]
    torch.cat(terms).mean().backward()

    assert math.isfinite(loss.item())
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)


def test_step_rewards_are_left_alone_unless_asked_for() -> None:
    model = tiny_llama()
    losses = []
    for steps in (STEPS, (None, None)):
        rows = [
            Row(token_ids=ids, reward=reward, token_rewards=tokens)
            for ids, tokens, reward in zip(IDS, steps, (1.0, 0.0), strict=True)
        ]
        losses.append(make_learner(model).accumulate([make_group(rows)], trainer_version=0)[0].item())
    assert losses[0] == losses[1]
