"""Two ranks for tests: rank 0 is this process, rank 1 another that follows it as the trainer's do.

In: settings. Out: a learner on both, and one on this process alone to compare it with. One pair of processes
serves many learners.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pipeline.config import Config, TrainerSettings
from pipeline.ranks.follower import follow
from pipeline.ranks.leader import LeadingLearner, tell
from pipeline.ranks.orders import Work
from pipeline.ranks.place import Place
from pipeline.ranks.world import World
from tests.integration.processes import forks

STARTS_S = 400.0  # a process that imports torch on a busy machine
TRAINER = {"learning_rate": 1e-5, "device": "cpu", "micro_batch_tokens": 64, "max_steps": 10}


def config_of(model: Path, **sections: dict[str, Any]) -> Config:
    """Settings of a learner; those of a section are added to what the tests have there."""
    trainer = TRAINER | {"collective_timeout_s": STARTS_S} | sections.pop("trainer", {})
    return Config.model_validate({"model": {"path": str(model)}, "trainer": trainer, **sections})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """world: as rank 0 sees it. other: the process of rank 1."""

    world: World
    other: BaseProcess

    @contextlib.contextmanager
    def learner(self, config: Config) -> Iterator[LeadingLearner]:
        """A learner on both."""
        self.world.tell(config.model_dump_json(exclude={"redis"}).encode())
        yield LeadingLearner.create(config, self.world)
        tell(self.world, Work.STOP)


@contextlib.contextmanager
def two_ranks() -> Iterator[Pair]:
    """Start rank 1 and meet it."""
    import torch.distributed as dist

    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = forks().Process(target=_be_rank_1, args=(store.port,), daemon=True)
    with mock.patch.dict(os.environ, variables(0, store.port)):
        other.start()
        world = World.join(Place(size=2), TrainerSettings.model_validate(TRAINER | {"collective_timeout_s": STARTS_S}))
    try:
        yield Pair(world=world, other=other)
    finally:
        if other.is_alive():
            with contextlib.suppress(RuntimeError):
                world.tell(b"")
            other.join(60)
            other.kill()
        other.join()
        world.leave()


def _be_rank_1(port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= variables(1, port)
    world = World.join(Place(rank=1, size=2, local_rank=1), TrainerSettings.model_validate(TRAINER))
    while words := world.hear():
        follow(Config.model_validate_json(words), world)
    world.leave()


def variables(rank: int, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
