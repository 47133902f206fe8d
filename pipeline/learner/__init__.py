"""Learners: scored groups in, new weights out.

In: the groups of one step and the trainer's weight version. Out: metrics, and weights to publish
and to keep. A learner knows nothing of queues; the same groups in any order give the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.checkpoints import Savable
from pipeline.config import Config
from pipeline.learner.scripted import ScriptedLearner
from pipeline.messages import ScoredGroup
from pipeline.weights import WeightState

if TYPE_CHECKING:
    from pipeline.learner.policy import PolicyLearner

__all__ = ["Learner", "PolicyLearner", "ScriptedLearner", "load_learner"]


class Learner(Protocol):
    """What a trainer needs of a learner. Its methods block and may run in a thread, one at a time."""

    def step(self, groups: Sequence[ScoredGroup], *, trainer_version: int) -> dict[str, float]:
        """One optimiser step on `groups`; returns metrics. Does not depend on their order.

        Raises MessageError when a token claims weights newer than `trainer_version`.
        """

    @property
    def num_weight_bytes(self) -> int:
        """Size of what `export_weights` gives."""

    def export_weights(self, weight_version: int) -> WeightState:
        """The current weights in host memory, under `weight_version`. They may change with the next step."""

    def state_dict(self) -> dict[str, object]:
        """All that an identical continuation needs: tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` gave."""

    def snapshot(self) -> Savable:
        """A copy in host memory of all that a checkpoint holds; the learner may go on while it is written."""

    def leave_device(self) -> None:
        """Move all to host memory, so that another process can use the device. A step takes it again."""

    def save_model(self, directory: Path) -> None:
        """Write the current weights as a Hugging Face directory (or adapter) that others can load."""


def load_learner(config: Config) -> Learner:
    """The learner that belongs to the generation engine. Raises ModelError, ConfigError."""
    if config.generation.engine == "scripted":
        return ScriptedLearner(config.trainer, config.staleness)
    from pipeline.learner.policy import PolicyLearner

    return PolicyLearner.create(config)


def __getattr__(name: str) -> object:
    """`PolicyLearner` on demand: it imports torch, which a scripted trainer does without."""
    if name != "PolicyLearner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline.learner.policy import PolicyLearner

    return PolicyLearner
