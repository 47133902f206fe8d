"""How many workers of each kind one machine runs, and how each is started.

In: settings and numbers. Out: a `WorkerSpec` for each process, cores and GPUs divided among them.
The server's address, which may hold a password, is in the environment only.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import Config
from pipeline.local.cores import available_cores, gpu_environ, thread_environ, visible_gpus
from pipeline.local.supervisor import WorkerSpec
from pipeline.scaling import GENERATOR, SCORER

TRAINER, EXPORTER = "trainer", "exporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """How many workers of each kind; there is always one trainer."""

    num_generators: int = 1
    num_scorers: int = 1
    has_exporter: bool = True

    def number_of(self, role: str) -> int:
        """Of the two kinds that come and go."""
        return {GENERATOR: self.num_generators, SCORER: self.num_scorers}[role]

    def with_number(self, role: str, number: int) -> Crew:
        """The same with so many of a kind that comes and goes."""
        if role == GENERATOR:
            return dataclasses.replace(self, num_generators=number)
        return dataclasses.replace(self, num_scorers=number)


def worker_specs(
    config: Config, crew: Crew, command: tuple[str, ...], config_file: Path, environ: Mapping[str, str]
) -> list[WorkerSpec]:
    """The processes of a run, in data-flow order."""
    places = [
        *((GENERATOR, index) for index in range(crew.num_generators)),
        *((SCORER, index) for index in range(crew.num_scorers)),
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
        name=f"{role}-{index + 1}" if role in {GENERATOR, SCORER} else role,
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
    if role not in {GENERATOR, TRAINER}:
        return thread_environ(1, environ)
    # Who takes turns with the others does not compute at the same time, and on the same device.
    num_at_once = crew.num_generators if config.is_colocated else crew.num_generators + 1
    chosen = config.generation.num_threads if role == GENERATOR else config.trainer.num_threads
    threads = {} if chosen else thread_environ(available_cores() // max(1, num_at_once), environ)
    gpus = [] if config.is_colocated else visible_gpus(environ)
    return {**threads, **gpu_environ(gpus, crew.num_generators if role == TRAINER else index, crew.num_generators)}


def _colours(environ: Mapping[str, str]) -> dict[str, str]:
    """Workers write into a pipe; what they write is coloured where our own output is."""
    return {"FORCE_COLOR": "1"} if sys.stdout.isatty() and not environ.get("NO_COLOR") else {}
