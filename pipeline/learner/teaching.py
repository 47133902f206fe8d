"""What teachers say of a step and of its micro-batches.

In: samples, micro-batches and what the policy gives for them. Out: what the loss takes of it, and how many
tokens were to be taught and are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.algorithms.distillation import generalized_jsd
from pipeline.batching import MicroBatch, Sample
from pipeline.config import AlgorithmSettings
from pipeline.policy import PolicyOutput


def what_teachers_say(settings: AlgorithmSettings, batch: MicroBatch, output: PolicyOutput) -> dict[str, Tensor]:
    """The part of `TokenInputs` that teachers have, each [B, T]; the same names whatever they have said of it."""
    said: dict[str, Tensor] = {}
    if batch.teacher_logprobs is not None:
        said["teacher_logprobs"] = batch.teacher_logprobs.to(output.logprobs.dtype)
    if not settings.jsd_coef:
        return said
    divergence = mass = torch.zeros_like(batch.targets, dtype=output.logprobs.dtype)  # [M]
    if batch.teacher_top is not None and output.top is not None:
        theirs, weights = batch.teacher_top.logprobs.to(output.top.dtype), batch.teacher_top.weights
        divergence, mass = generalized_jsd(theirs, output.top, weights.to(theirs.dtype), beta=settings.jsd_beta)
    return said | {"teacher_jsd": batch.scatter(divergence), "teacher_top_mass": batch.scatter(mass)}


def count_untaught(settings: AlgorithmSettings, samples: Sequence[Sample], warn: Callable[..., None]) -> int:
    """Tokens to train on that a teacher should have told of; warns where that is none at all."""
    if not settings.has_teacher:
        return 0
    num_untaught = sum(
        sample.num_tokens if settings.jsd_coef and not sample.score.teacher_top else sample.num_untaught
        for sample in samples
    )
    if num_untaught and num_untaught == sum(sample.num_tokens for sample in samples):
        warn(
            "teacher_logprobs_missing",
            tokens=num_untaught,
            consequence="nothing is learnt from a teacher",
            way_out="look at scoring.teacher_column, and that groups pass the stage of teachers",
        )
    return num_untaught
