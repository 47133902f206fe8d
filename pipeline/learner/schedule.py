"""The learning rate of every step, as a function of the step alone."""

from __future__ import annotations

import math

from pipeline.config import TrainerSettings
from pipeline.errors import ConfigError


def check_schedule(trainer: TrainerSettings) -> None:
    """Raises ConfigError where the schedule needs an end and there is none."""
    if trainer.schedule != "constant" and not trainer.max_steps:
        raise ConfigError(
            f"trainer.schedule = {trainer.schedule!r} needs to know the last step: set trainer.max_steps, "
            'or trainer.schedule = "constant"'
        )


def learning_rate(trainer: TrainerSettings, step: int) -> float:
    """Learning rate of step `step`, from 0: linear warm-up, then the schedule down to 0 at max_steps."""
    if step < trainer.warmup_steps:
        return trainer.learning_rate * (step + 1) / (trainer.warmup_steps + 1)
    if trainer.schedule == "constant":
        return trainer.learning_rate
    span = max(1, trainer.max_steps - trainer.warmup_steps)
    progress = min(1.0, (step - trainer.warmup_steps) / span)
    factor = 1.0 - progress if trainer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return trainer.learning_rate * factor
