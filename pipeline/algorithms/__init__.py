"""Algorithms: tables of pure functions, and presets that name one of each.

In: names from the settings. Out: an `Algorithm`. To add a function, write it in the table's module
with its formula, shapes and source, and enter it in the table; settings can name it at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from pipeline.algorithms.advantages import ADVANTAGES
from pipeline.algorithms.aggregations import AGGREGATIONS
from pipeline.algorithms.carriers import BatchShape, RewardBatch
from pipeline.algorithms.corrections import CORRECTIONS
from pipeline.algorithms.divergences import DIVERGENCES
from pipeline.algorithms.losses import LOSSES
from pipeline.algorithms.objective import Algorithm, Objective, TokenInputs, evaluate
from pipeline.algorithms.process import with_process_rewards
from pipeline.algorithms.proximal import PROXIMALS
from pipeline.algorithms.sequence_corrections import m2po_limit
from pipeline.config import AlgorithmSettings
from pipeline.config.conflicts import conflicts
from pipeline.config.presets import PRESETS
from pipeline.errors import ConfigError

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "DIVERGENCES",
    "LOSSES",
    "PRESETS",
    "PROXIMALS",
    "Algorithm",
    "BatchShape",
    "Objective",
    "RewardBatch",
    "TokenInputs",
    "evaluate",
    "m2po_limit",
    "resolve_algorithm",
    "with_process_rewards",
]

Entry = TypeVar("Entry")


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The preset's functions, each replaced where a setting names another.

    Raises ConfigError for a name that is in no table, and for parts that cancel each other.
    """
    _look_up("preset", settings.preset, PRESETS)
    resolved = settings.resolved
    algorithm = Algorithm(
        advantage=_look_up("advantage", resolved.advantage, ADVANTAGES),
        loss=_look_up("loss", resolved.loss, LOSSES),
        correction=_look_up("correction", resolved.correction, CORRECTIONS),
        aggregation=_look_up("aggregation", resolved.aggregation, AGGREGATIONS),
        proximal=_look_up("proximal", resolved.proximal, PROXIMALS),
        divergence=_look_up("kl_estimator", resolved.kl_estimator, DIVERGENCES),
        settings=resolved,
    )
    if problems := conflicts(resolved):
        raise ConfigError("\n".join(problems))
    return algorithm


def _look_up(setting: str, name: str, table: Mapping[str, Entry]) -> Entry:
    if name in table:
        return table[name]
    nearest = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ConfigError(f"algorithm.{setting} = {name!r} is not known{hint} There are: {', '.join(sorted(table))}")
