"""The learning rate as a function of the step."""

from __future__ import annotations

import pytest

from pipeline.config import TrainerSettings
from pipeline.learner.schedule import learning_rate


def rates(num_steps: int, **settings: object) -> list[float]:
    trainer = TrainerSettings.model_validate({"learning_rate": 1.0, "max_steps": 6} | settings)
    return [learning_rate(trainer, step) for step in range(num_steps)]


def test_constant_rate_needs_no_end() -> None:
    assert rates(3, max_steps=0) == [1.0, 1.0, 1.0]


def test_warm_up_rises_to_the_peak_and_never_starts_at_zero() -> None:
    assert rates(5, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_and_cosine_fall_from_the_peak_to_zero_at_the_end() -> None:
    assert rates(7, schedule="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0])
    assert rates(8, schedule="cosine", warmup_steps=2)[2:] == pytest.approx(
        [1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6
    )
