"""Rank 0: the learner that a trainer sees, with the others behind it.

In: what a trainer asks of a learner. Out: the same answers as from one rank. Whatever all ranks have to do
together is told to the others first. Where each has all weights, only steps are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.checkpoints import Savable
from pipeline.config import Config
from pipeline.learner.policy import PolicyLearner
from pipeline.messages import ScoredGroup
from pipeline.ranks.orders import Order, Work
from pipeline.ranks.world import World, collective
from pipeline.weights import WeightState
from pipeline.wire import encode

_STOP_S = 10.0


class LeadingLearner:
    """A `Learner` on all ranks. Its methods raise RankLostError where another rank is gone."""

    def __init__(self, learner: PolicyLearner, world: World) -> None:
        self._learner = learner
        self._world = world

    @classmethod
    def create(cls, config: Config, world: World) -> LeadingLearner:
        """Load the model and spread it. Raises ModelError, ConfigError, RankLostError."""
        world.use_device()
        with collective():
            learner = PolicyLearner.create(config, world, on_loaded=lambda: tell(world, Work.BUILD))
        return cls(learner, world)

    def step(self, groups: Sequence[ScoredGroup], *, trainer_version: int) -> dict[str, float]:
        """One optimiser step of all ranks. The groups are sent one by one, to hold one more in memory, not all."""
        with self._together():
            self._world.tell(Order(work=Work.STEP, version=trainer_version, num_groups=len(groups)).encode())
            for group in groups:
                self._world.tell(encode(group))
            return self._learner.step(groups, trainer_version=trainer_version)

    @property
    def num_weight_bytes(self) -> int:
        """Size of what `export_weights` gives."""
        return self._learner.num_weight_bytes

    def export_weights(self, weight_version: int) -> WeightState:
        """The current weights, gathered tensor by tensor into host memory."""
        with self._together(Work.EXPORT):
            return self._learner.export_weights(weight_version)

    def state_dict(self) -> dict[str, object]:
        """All that an identical continuation needs, on any number of ranks."""
        with self._together(Work.STATE):
            return self._learner.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` gave, on however many ranks. Raises ModelError."""
        self._learner.check_state(state)
        with self._together():
            tell(self._world, Work.LOAD)
            self._learner.load_state_dict(state)

    def snapshot(self) -> Savable:
        """A copy of all that a checkpoint holds, in the host memory of rank 0."""
        with self._together(Work.SNAPSHOT):
            return self._learner.snapshot()

    def leave_device(self) -> None:
        """Move all to host memory, on every rank."""
        with self._together():
            tell(self._world, Work.LEAVE_DEVICE)
            self._learner.leave_device()

    def save_model(self, directory: Path) -> None:
        """Write the current weights as a Hugging Face directory (or adapter)."""
        with self._together(Work.MODEL):
            snapshot = self._learner.model_snapshot()
        snapshot.save_model(directory)

    @contextlib.contextmanager
    def _together(self, gathering: Work | None = None) -> Iterator[None]:
        """gathering: what the others have to help with where weights are spread over ranks."""
        self._world.use_device()
        with collective():
            if gathering is not None and self._learner.is_sharded:
                tell(self._world, gathering)
            yield


def tell(world: World, work: Work) -> None:
    """An order that says all by itself."""
    world.tell(Order(work=work).encode())


def dismiss(world: World) -> None:
    """Send the others home. One that does not listen any more is left to notice that this process has ended."""
    if world.is_alone:
        return

    def say() -> None:
        with contextlib.suppress(RuntimeError):
            tell(world, Work.STOP)
            world.leave()

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(_STOP_S)
