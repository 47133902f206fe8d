"""The learning curve of a run as a PNG.

In: metric records, one a step. Out: reward and evaluation above, staleness below. matplotlib is
optional and imported only here; without it there is no picture, and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_EVALUATION = "eval_reward"
_SMOOTHING = 0.15


def draw(
    records: Sequence[Mapping[str, Any]],
    png: Path,
    *,
    title: str,
    temperature: float = 1.0,
    eval_temperature: float = 0.0,
) -> Path | None:
    """Write the picture and return its path; None without matplotlib or without anything to draw.

    records: with `step` and any of reward_mean, eval_reward, staleness_mean, staleness_max. The two
    temperatures are why the two rewards differ, so the legend names them.
    """
    reward, evaluation = _series(records, "reward_mean"), _series(records, _EVALUATION)
    if not reward[0] and not evaluation[0]:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot(*reward, color="tab:blue", alpha=0.3, linewidth=1)
    above.plot(
        reward[0], _smoothed(reward[1]), color="tab:blue", label=f"reward, {how_sampled(temperature)} (smoothed)"
    )
    above.plot(*evaluation, color="tab:orange", marker="o", label=f"held-out reward, {how_sampled(eval_temperature)}")
    below.plot(*_series(records, "staleness_mean"), color="tab:green", label="mean")
    below.plot(*_series(records, "staleness_max"), color="tab:red", linewidth=1, label="max")
    above.set(title=title, ylabel="reward")
    below.set(xlabel="step", ylabel="staleness (versions)")
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="best")
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=120, format="png")
    return png


def how_sampled(temperature: float) -> str:
    """`greedy`, or `sampled at temperature 0.8`."""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"


def _series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values, where there is a value."""
    points = [(record["step"], record[name]) for record in records if isinstance(record.get(name), int | float)]
    return [step for step, _ in points], [value for _, value in points]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average that starts at the first value."""
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else smooth[-1] + _SMOOTHING * (value - smooth[-1]))
    return smooth
