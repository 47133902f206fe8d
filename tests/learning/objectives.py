"""Objectives of a single micro-batch."""

from __future__ import annotations

import torch

from pipeline.algorithms import Algorithm, Objective, TokenInputs, evaluate, resolve_algorithm
from pipeline.config import AlgorithmSettings


def algorithm(**changes: object) -> Algorithm:
    return resolve_algorithm(AlgorithmSettings.model_validate(changes))


def objective_of(
    algorithm: Algorithm,
    trainer: torch.Tensor,
    generator: torch.Tensor,
    advantages: torch.Tensor,
    *,
    reference: torch.Tensor | None = None,
    ages: torch.Tensor | None = None,
) -> Objective:
    """Of one micro-batch of which every token is trained on."""
    return evaluate(
        algorithm,
        TokenInputs(
            trainer_logprobs=trainer,
            generator_logprobs=generator,
            advantages=advantages,
            mask=torch.ones_like(generator, dtype=torch.bool),
            ages=torch.zeros_like(generator, dtype=torch.int64) if ages is None else ages,
            ref_logprobs=reference,
            limit=torch.tensor(torch.inf),
        ),
    )
