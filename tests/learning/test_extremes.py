"""Whatever number a setting takes, the trainer can compute with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pipeline.config import AlgorithmSettings, StalenessSettings, TrainerSettings
from pipeline.messages import ScoredGroup
from tests.learning.builders import make_learner, random_groups, tiny_llama

MODELS: Mapping[str, type[BaseModel]] = {
    "algorithm": AlgorithmSettings,
    "trainer": TrainerSettings,
    "staleness": StalenessSettings,
}
# What has to be chosen for the setting to be read.
READ_WITH: Mapping[str, dict[str, object]] = {
    "clip_low": {"loss": "ppo_clip"},
    "clip_high": {"loss": "ppo_clip"},
    "dual_clip": {"loss": "ppo_clip"},
    "gspo_clip_low": {"loss": "gspo"},
    "gspo_clip_high": {"loss": "gspo"},
    "cispo_max": {"loss": "cispo"},
    "sapo_tau_positive": {"loss": "sapo"},
    "sapo_tau_negative": {"loss": "sapo"},
    "gmpo_clip": {"loss": "gmpo"},
    "dppo_max": {"loss": "dppo"},
    "truncation": {"correction": "tis"},
    "band_low": {"correction": "icepop", "band_high": 1e9},
    "band_high": {"correction": "icepop"},
    "geometric_band": {"correction": "geometric_mis"},
    "m2po_max": {"correction": "m2po"},
    "opsm_max": {"correction": "opsm"},
    "aggregation_length": {"aggregation": "constant"},
    "process_weight": {"process": "returns"},
    "overlong_buffer": {"overlong": True},
    "overlong_penalty": {"overlong": True, "overlong_buffer": 1.0},
    "kl_coef": {"kl_in": "loss", "kl_estimator": "k3"},
    "learning_rate": {"weight_decay": 0.1},
    "warmup_steps": {"schedule": "cosine"},
    "max_steps": {"schedule": "linear"},
}

REFUSED = {("max_steps", 0)}  # a schedule that ends needs an end


def numbers() -> Iterator[tuple[str, str, FieldInfo]]:
    """Section and name of every setting that is a number."""
    for section, model in MODELS.items():
        for name, field in model.model_fields.items():
            if field.annotation in {int, float}:
                yield section, name, field


def bounds(field: FieldInfo) -> list[float]:
    """The smallest and the largest number that it takes."""
    found: list[float] = []
    for bound in field.metadata:
        match bound:
            case Ge(ge=value) | Le(le=value):
                found.append(value)  # type: ignore[arg-type]
            case Gt(gt=value):
                found.append(math.nextafter(value, math.inf))  # type: ignore[arg-type]
            case Lt(lt=value):
                found.append(math.nextafter(value, -math.inf))  # type: ignore[arg-type]
    return sorted(found)


EXTREMES = [(section, name, value) for section, name, field in numbers() for value in bounds(field)]


@pytest.fixture(scope="module")
def groups() -> list[ScoredGroup]:
    """With rewards of steps, and logprobs that are those of an older policy."""
    return [
        replace(
            group,
            scores=tuple(
                replace(score, token_rewards=np.linspace(0, 1, len(completion), dtype=np.float32))
                for score, completion in zip(group.scores, group.rollout.completions, strict=True)
            ),
        )
        for group in random_groups(tiny_llama(), noise=0.3)
    ]


def test_every_number_has_a_smallest_and_a_largest() -> None:
    assert [name for _, name, field in numbers() if len(bounds(field)) != 2] == []
    assert READ_WITH.keys() <= {name for _, name, _ in numbers()}


@pytest.mark.parametrize(("section", "name", "value"), EXTREMES, ids=str)
def test_the_trainer_takes_a_step_with_the_extremes_of_every_number(
    section: str, name: str, value: float, groups: list[ScoredGroup]
) -> None:
    words = {part: _words(part, section, name, value) for part in MODELS}
    algorithm = AlgorithmSettings.model_validate(words["algorithm"])
    model = tiny_llama(dtype=torch.float32)
    learner = make_learner(
        model,
        algorithm=algorithm,
        trainer={"learning_rate": 1e-6, **words["trainer"]},
        staleness=StalenessSettings.model_validate(words["staleness"]),
        reference=tiny_llama(2, dtype=torch.float32) if algorithm.kl_coef else None,
    )
    first = learner.step(groups, trainer_version=1)
    assert first["skipped_steps"] == 0, "loss and gradients are finite"
    learner.step(groups, trainer_version=1)
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def _words(part: str, section: str, name: str, value: float) -> dict[str, object]:
    if part != section:
        return {}
    return {name: value} if (name, value) in REFUSED else READ_WITH.get(name, {}) | {name: value}


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (TrainerSettings, "beta1", 1.0),
        (TrainerSettings, "beta2", 1.0),
        (TrainerSettings, "learning_rate", 1e300),
        (TrainerSettings, "num_threads", 2**31),
        (TrainerSettings, "warmup_steps", 10**400),
        (AlgorithmSettings, "clip_high", 1e308),
        (AlgorithmSettings, "aggregation_length", 10**40),
        (AlgorithmSettings, "sapo_tau_positive", 1e-300),
    ],
)
def test_numbers_that_no_tensor_holds_are_refused(model: type[BaseModel], name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=r"should be (less|greater) than"):
        model.model_validate({name: value})
