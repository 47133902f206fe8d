"""Algorithms: tables of pure functions, and presets that name one of each.

In: names from the settings. Out: an `Algorithm`. To add a function, write it in the table's module
with its formula, shapes and source, and enter it in the table; settings can name it at once.
"""

from __future__ import annotations

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
from pipeline.config.presets import PRESETS, look_up
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


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The preset's functions, each replaced where a setting names another.

    Raises ConfigError for a name that is in no table, and for parts that cancel each other.
    """
    look_up("preset", settings.preset, PRESETS)
    resolved = settings.resolved
    algorithm = Algorithm(
        advantage=look_up("advantage", resolved.advantage, ADVANTAGES),
        loss=look_up("loss", resolved.loss, LOSSES),
        correction=look_up("correction", resolved.correction, CORRECTIONS),
        aggregation=look_up("aggregation", resolved.aggregation, AGGREGATIONS),
        proximal=look_up("proximal", resolved.proximal, PROXIMALS),
        divergence=look_up("kl_estimator", resolved.kl_estimator, DIVERGENCES),
        settings=resolved,
    )
    if problems := conflicts(resolved):
        raise ConfigError("\n".join(problems))
    return algorithm
