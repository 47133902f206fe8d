"""What came of a run, for the person who has waited for it.

In: the run's directory, its ledger. Out: a few lines. It reads records and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.checkpoints import Checkpoints
from pipeline.config import Config
from pipeline.prompts.statistics import Coverage
from pipeline.queues.ledger import Ledger
from pipeline.records.recorder import read_metrics


def summary_lines(config: Config, ledger: Ledger | None, *, seconds: float) -> Iterator[str]:
    """Rewards, steps and time; where all groups are; where the results lie. seconds: of this `up`."""
    rows = read_metrics(config.run_dir)
    parts = [
        *_first_and_last("reward", rows, "reward_mean"),
        *_first_and_last("held-out reward", rows, "eval_reward"),
    ]
    steps = [row["step"] for row in rows if "reward_mean" in row]
    yield ", ".join([*parts, f"{max(steps, default=0)} steps, {_duration(seconds)}"])
    if ledger is not None:
        yield f"ledger: {ledger.equation}"
    if (coverage := last_coverage(rows)) is not None:
        yield f"prompts: {coverage}"
    newest = Checkpoints(config.run_dir / "checkpoints", config.checkpoint).latest()
    yield f"checkpoint: {newest.path if newest else 'none'}"
    yield f"records: {config.run_dir}"


def last_coverage(rows: Sequence[Mapping[str, Any]]) -> Coverage | None:
    """What was seen and solved of the data set by the last step; None where no row says so."""
    return next((coverage for row in reversed(rows) if (coverage := Coverage.of(row)) is not None), None)


def _first_and_last(what: str, rows: Sequence[Mapping[str, Any]], name: str) -> Iterator[str]:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    if values:
        yield f"{what} {values[0]:.3f} -> {values[-1]:.3f}"


def _duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
