"""Which of a trainer's ranks this process is, as torchrun says in the environment.

In: environment variables. Out: a `Place`. Imports no torch: a command asks before it loads anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.errors import ConfigError

_ALSO_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_WAY_OUT = "start it with `torchrun --nproc-per-node N --no-python rollstream trainer`, or unset WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """rank: of all `size` of them. local_rank: of those on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the one that the run knows."""
        return self.rank == 0


def place_of(environ: Mapping[str, str]) -> Place:
    """Raises ConfigError where there are to be several ranks and a variable is missing or makes no sense."""
    size = _number(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else 1
    if size == 1:
        return Place()
    if missing := [name for name in _ALSO_NEEDED if not environ.get(name)]:
        raise ConfigError(f"WORLD_SIZE = {size}, but {', '.join(missing)} not set: {_WAY_OUT}")
    rank, local_rank = _number(environ, "RANK"), _number(environ, "LOCAL_RANK")
    if size < 1 or rank >= size or local_rank > rank:
        raise ConfigError(f"WORLD_SIZE = {size}, RANK = {rank} and LOCAL_RANK = {local_rank} do not fit: {_WAY_OUT}")
    return Place(rank=rank, size=size, local_rank=local_rank)


def check_settings(config: Config, place: Place) -> None:
    """Raises ConfigError for what cannot be trained on several ranks."""
    size = place.size if place.size > 1 else config.trainer.num_ranks
    if size == 1:
        return
    if config.generation.engine == "scripted":
        raise ConfigError(
            f'generation.engine = "scripted" has no model that {size} ranks could share; start its trainer without '
            "torchrun, with trainer.num_ranks = 1"
        )
    if config.is_colocated and config.trainer.parallel == "fsdp":
        raise ConfigError(
            'trainer.parallel = "fsdp" with run.topology = "colocated": weights that are spread over ranks do not '
            'leave their devices; set trainer.parallel = "ddp", or run.topology = "disaggregated"'
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(f"{name} = {environ[name]!r} is no number: {_WAY_OUT}")
    return int(environ[name])
