"""Algorithms: four tables of pure functions, and presets that name one of each.

In: names from the settings. Out: an `Algorithm`. To add a function, write it in the table's module
with its formula, shapes and source, and enter it in the table; settings can name it at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from pipeline.algorithms.advantages import ADVANTAGES
from pipeline.algorithms.aggregations import AGGREGATIONS
from pipeline.algorithms.carriers import RewardBatch
from pipeline.algorithms.corrections import CORRECTIONS
from pipeline.algorithms.losses import LOSSES
from pipeline.algorithms.objective import Algorithm, Objective, TokenInputs, evaluate
from pipeline.algorithms.presets import PRESETS
from pipeline.config import AlgorithmSettings
from pipeline.errors import ConfigError

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "LOSSES",
    "PRESETS",
    "Algorithm",
    "Objective",
    "RewardBatch",
    "TokenInputs",
    "evaluate",
    "resolve_algorithm",
]

Entry = TypeVar("Entry")


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The preset's functions, each replaced where a setting names another.

    Raises ConfigError for a name that is in no table.
    """
    preset = _look_up("preset", settings.preset, PRESETS)
    return Algorithm(
        advantage=_look_up("advantage", settings.advantage or preset.advantage, ADVANTAGES),
        loss=_look_up("loss", settings.loss or preset.loss, LOSSES),
        correction=_look_up("correction", settings.correction or preset.correction, CORRECTIONS),
        aggregation=_look_up("aggregation", settings.aggregation or preset.aggregation, AGGREGATIONS),
    )


def _look_up(setting: str, name: str, table: Mapping[str, Entry]) -> Entry:
    if name in table:
        return table[name]
    nearest = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ConfigError(f"algorithm.{setting} = {name!r} is not known{hint} There are: {', '.join(sorted(table))}")
