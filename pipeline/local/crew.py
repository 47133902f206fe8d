"""How many workers of each kind one machine runs, and how each is started.

In: settings and numbers. Out: a `WorkerSpec` for each process, cores and GPUs divided among them.
The server's address, which may hold a password, is in the environment only.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.config.scoring import ModelAtWork
from pipeline.local.cores import available_cores, gpu_environ, thread_environ, visible_gpus
from pipeline.local.supervisor import WorkerSpec
from pipeline.route import stages_of
from pipeline.scaling import GENERATOR, JUDGE, SCALED_ROLES, SCORER, TEACHER

TRAINER, EXPORTER = "trainer", "exporter"
_FIELDS = {GENERATOR: "num_generators", SCORER: "num_scorers", TEACHER: "num_teachers", JUDGE: "num_judges"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """How many workers of each kind; there is always one trainer.

    num_teachers, num_judges: where the run has such a stage, and only there.
    """

    num_generators: int = 1
    num_scorers: int = 1
    num_teachers: int = 1
    num_judges: int = 1
    has_exporter: bool = True

    def numbers(self, config: Config) -> dict[str, int]:
        """Of the kinds that come and go, as far as the run has them, in data-flow order."""
        return {role: getattr(self, _FIELDS[role]) for role in stages_of(config.scoring) if role in SCALED_ROLES}

    def with_number(self, role: str, number: int) -> Crew:
        """The same with so many of a kind that comes and goes."""
        changes: dict[str, Any] = {_FIELDS[role]: number}
        return dataclasses.replace(self, **changes)


def worker_specs(
    config: Config, crew: Crew, command: tuple[str, ...], config_file: Path, environ: Mapping[str, str]
) -> list[WorkerSpec]:
    """The processes of a run, in data-flow order."""
    places = [
        *((role, index) for role, number in crew.numbers(config).items() for index in range(number)),
        (TRAINER, 0),
        *((EXPORTER, 0) for _ in range(crew.has_exporter)),
    ]
    return [worker_spec(role, index, config, crew, command, config_file, environ) for role, index in places]


def worker_spec(
    role: str,
    index: int,
    config: Config,
    crew: Crew,
    command: tuple[str, ...],
    config_file: Path,
    environ: Mapping[str, str],
) -> WorkerSpec:
    """One process. index: among those of its role, from 0. crew: who shares the machine with it."""
    return WorkerSpec(
        name=f"{role}-{index + 1}" if role in SCALED_ROLES else role,
        argv=(*command, role, "-c", str(config_file)),
        environ={
            "REDIS_URL": config.redis.url.get_secret_value(),
            **_colours(environ),
            **_share(role, index, config, crew, environ),
        },
        unset=tuple(name for name in environ if name.startswith("ROLLSTREAM_") and "__" in name),
        ends_run=role == TRAINER,
    )


def _share(role: str, index: int, config: Config, crew: Crew, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that give a process its part of the machine."""
    num_models = _num_with_models(config, crew)
    if role not in {GENERATOR, TRAINER, *num_models}:
        return thread_environ(1, environ)
    # Who takes turns with the others does not compute at the same time, and on the same device.
    num_ranks = config.trainer.num_ranks
    num_at_once = max(crew.num_generators, num_ranks) if config.is_colocated else crew.num_generators + num_ranks
    chosen = {GENERATOR: config.generation.num_threads, TRAINER: config.trainer.num_threads}.get(role, 0)
    share = available_cores() // max(1, num_at_once + sum(num_models.values()))
    threads = {} if chosen else thread_environ(share, environ)
    if role in num_models:
        return threads  # it sees all GPUs; `device` of its settings says which it takes
    gpus = [] if config.is_colocated else visible_gpus(environ)
    place = crew.num_generators if role == TRAINER else index
    return {**threads, **gpu_environ(gpus, place, crew.num_generators, num_ranks)}


def _num_with_models(config: Config, crew: Crew) -> dict[str, int]:
    """Workers that score with a model of their own, by role."""
    models: dict[str, Sequence[ModelAtWork]] = {TEACHER: config.scoring.teachers, JUDGE: config.scoring.judges}
    return {role: crew.numbers(config)[role] for role, items in models.items() if any(not item.url for item in items)}


def _colours(environ: Mapping[str, str]) -> dict[str, str]:
    """Workers write into a pipe; what they write is coloured where our own output is."""
    return {"FORCE_COLOR": "1"} if sys.stdout.isatty() and not environ.get("NO_COLOR") else {}
