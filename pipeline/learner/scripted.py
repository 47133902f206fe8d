"""The learner without a model: for tests, benchmarks and trying out the queues.

In: scored groups. Out: the metrics that can be had without a policy, and a weight object that holds
nothing but its version. Imports no torch.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.config import StalenessSettings, TrainerSettings
from pipeline.learner.report import describe_groups, in_feeding_order
from pipeline.messages import ScoredGroup
from pipeline.staleness import assess
from pipeline.weights import HostTensor, WeightKind, WeightState


class ScriptedLearner:
    """Takes `trainer.scripted_step_s` for a step and learns nothing."""

    def __init__(
        self, trainer: TrainerSettings, staleness: StalenessSettings, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._step_s = trainer.scripted_step_s
        self._staleness = staleness
        self._sleep = sleep
        self._num_steps = 0

    def step(self, groups: Sequence[ScoredGroup], *, trainer_version: int) -> dict[str, float]:
        """Wait as long as told and report on the groups."""
        ordered = in_feeding_order(groups)
        assessments = [assess(group, trainer_version, self._staleness) for group in ordered]
        if self._step_s > 0:
            self._sleep(self._step_s)
        self._num_steps += 1
        return describe_groups(ordered, assessments)

    @property
    def num_weight_bytes(self) -> int:
        """Of one number."""
        return 8

    def export_weights(self, weight_version: int) -> WeightState:
        """One int64 tensor named "version" with the version in it."""
        data = memoryview(np.array([weight_version], dtype="<i8").tobytes())
        return WeightState(
            weight_version=weight_version,
            kind=WeightKind.SNAPSHOT,
            tensors={"version": HostTensor(dtype="int64", shape=(1,), data=data)},
        )

    def state_dict(self) -> dict[str, object]:
        """The number of steps."""
        return {"num_steps": self._num_steps}

    def snapshot(self) -> ScriptedLearner:
        """As it is now."""
        return copy.copy(self)

    def leave_device(self) -> None:
        """It has none."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` gave."""
        num_steps = state["num_steps"]
        assert isinstance(num_steps, int)
        self._num_steps = num_steps

    def save_model(self, directory: Path) -> None:
        """A small JSON file in place of a model."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "scripted.json").write_text(json.dumps(self.state_dict()) + "\n", encoding="utf-8")
