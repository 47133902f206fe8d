"""What a study of staleness says: final rewards with intervals, samples that were needed, a picture.

In: curves by case. Out: numbers, a table in Markdown, a PNG. Intervals are Student's over the seeds; the
loss against fresh samples is of pairs of the same seed, which see the same words.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.staleness_run import CORRECTIONS, Case, Curve

LEVEL = 0.9
_LAST = 2
# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_COLOURS = {"none": "tab:red", "clip": "tab:green", "tis": "tab:blue", "decoupled_ppo": "tab:orange"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over seeds, and half of the width of its 95 % interval; NaN with one seed."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One correction at one lag, over all seeds.

    loss: what the final reward is below that of fresh samples, of pairs of the same seed; None without those.
    samples: median of the completions trained on before LEVEL was seen; None where most runs did not see it.
    reached: share of the runs that saw it.
    """

    final: Estimate
    training: Estimate
    loss: Estimate | None
    samples: int | None
    reached: float
    described: Mapping[str, float]


def figures(curves: Mapping[Case, Curve]) -> dict[str, object]:
    """All of it, flat, named by correction and lag."""
    found: dict[str, object] = {}
    for (correction, lag), cell in cells(curves).items():
        name = f"{correction}_lag_{lag}"
        found |= {f"final_{name}": _rounded(cell.final.mean), f"final_half_{name}": _rounded(cell.final.half)}
        found |= {f"training_{name}": _rounded(cell.training.mean)}
        found |= {f"samples_to_{LEVEL:g}_{name}".replace(".", ""): cell.samples}
        if cell.loss is not None:
            found |= {f"loss_{name}": _rounded(cell.loss.mean), f"loss_half_{name}": _rounded(cell.loss.half)}
    return found


def table(curves: Mapping[Case, Curve]) -> str:
    """The same as a Markdown table, without the columns that nothing is in."""
    ordered = sorted(cells(curves).items(), key=lambda item: item[0][1])
    rows = [_row(correction, lag, cell) for (correction, lag), cell in ordered]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [names, *([row[name] for name in names] for row in rows)]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, f"|{'---|' * len(names)}", *body])


def _row(correction: str, lag: int, cell: Cell) -> dict[str, str]:
    """Column -> what is in it."""
    number = {
        f"`{name}`": f"{cell.described.get(name, 0.0):.{digits}f}"
        for name, digits in (
            ("mismatch_kl", 3),
            ("effective_sample_size", 2),
            ("clip_fraction", 3),
            ("truncated_fraction", 3),
        )
    }
    return {
        "lag": str(lag),
        "correction": f"`{correction}`" if lag or correction not in CORRECTIONS else "any",
        "held-out reward at the end": str(cell.final),
        "less than fresh by": str(cell.loss) if cell.loss is not None and lag else "",
        "training reward at the end": str(cell.training),
        f"samples to {LEVEL:g}": f"{cell.samples:,}"
        if cell.samples is not None
        else f"({cell.reached:.0%} of the runs)",
        **number,
    }


def cells(curves: Mapping[Case, Curve]) -> dict[tuple[str, int], Cell]:
    """(correction, lag) -> what came of it, in the order of the cases."""
    grouped: dict[tuple[str, int], dict[int, Curve]] = {}
    for case, curve in curves.items():
        grouped.setdefault((case.correction, case.lag), {})[case.seed] = curve
    found = {}
    for (correction, lag), by_seed in grouped.items():
        fresh = grouped.get(("none" if correction in CORRECTIONS else correction, 0), {})
        found[correction, lag] = _cell(by_seed, fresh)
    return found


def _cell(by_seed: Mapping[int, Curve], fresh: Mapping[int, Curve]) -> Cell:
    runs = list(by_seed.values())
    losses = [_final(fresh[seed].held_out) - _final(curve.held_out) for seed, curve in by_seed.items() if seed in fresh]
    needed = sorted(_needed(curve) for curve in runs)
    median = needed[len(needed) // 2]
    return Cell(
        final=estimate([_final(curve.held_out) for curve in runs]),
        training=estimate([_final(curve.training) for curve in runs]),
        loss=estimate(losses) if losses else None,
        samples=int(median) if math.isfinite(median) else None,
        reached=sum(map(math.isfinite, needed)) / len(needed),
        described={
            name: statistics.fmean(curve.described.get(name, 0.0) for curve in runs) for name in runs[0].described
        },
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half width of Student's interval over up to ten values."""
    if len(values) < 2:
        return Estimate(mean=statistics.fmean(values), half=math.nan)
    half = _STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), half=half)


def _final(values: Sequence[float]) -> float:
    """Mean over the last few evaluations, each of which is noisy by itself."""
    return statistics.fmean(values[-_LAST:])


def _needed(curve: Curve) -> float:
    """Completions trained on before the first evaluation at LEVEL; infinite where there was none."""
    return next(
        (float(samples) for samples, value in zip(curve.samples, curve.held_out, strict=True) if value >= LEVEL),
        math.inf,
    )


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def draw(curves: Mapping[Case, Curve], png: Path) -> Path | None:
    """Held-out reward against samples, a panel for each lag; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lags = sorted({case.lag for case in curves if case.lag}) or [0]
    figure = Figure(figsize=(3.2 * len(lags) + 0.8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lags), sharey=True, squeeze=False)[0]
    for axes, lag in zip(panels, lags, strict=True):
        _band(axes, [curve for case, curve in curves.items() if case.lag == 0], "black", "fresh samples")
        for correction in _COLOURS if lag else ():
            mine = [curve for case, curve in curves.items() if (case.lag, case.correction) == (lag, correction)]
            _band(axes, mine, _COLOURS[correction], correction)
        axes.set(title=f"{lag} version{'s' if lag > 1 else ''} old", xlabel="thousands of completions trained on")
        axes.axhline(LEVEL, color="grey", linewidth=0.8, linestyle=":")
        axes.grid(visible=True, alpha=0.3)
    panels[0].set(ylabel="held-out exact match")
    panels[0].legend(loc="lower right")  # with the youngest samples, where no curve lies so low
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=90, format="png")
    return png


def _band(axes: Any, curves: Sequence[Curve], colour: str, label: str) -> None:
    """Mean over seeds, and all that lies between the lowest and the highest."""
    if not curves:
        return
    samples = [number / 1000 for number in curves[0].samples]
    columns = list(zip(*(curve.held_out for curve in curves), strict=True))
    axes.plot(samples, [statistics.fmean(column) for column in columns], color=colour, label=label)
    axes.fill_between(samples, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.15, linewidth=0)
