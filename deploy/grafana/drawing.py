"""Pictures of panels, in the manner of Grafana's dark theme.

In: a panel as Grafana reads it, series, and a place on a figure. Out: the panel drawn there. It shows
what Grafana would show, not how exactly Grafana would draw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from deploy.grafana.answers import Mark, Series, Values

BACK, PANEL, TEXT, FAINT, GRID = "#111217", "#181b1f", "#d8d9da", "#8e8e94", "#2c3036"
_COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#f2495c", "#5cc8d7", "#ffa6b0", "#96d98d", "#8ab8ff")
_NAMED = {"green": "#73bf69", "yellow": "#f2cc0c", "red": "#f2495c", "blue": "#5794f2"}
# What is shown again and again looks the same on every panel.
_COLOR_OF = {
    "generator": _COLORS[0],
    "prompts": _COLORS[0],
    "training": _COLORS[0],
    "live": _COLORS[0],
    "scorer": _COLORS[1],
    "rollouts": _COLORS[1],
    "teacher": _COLORS[6],
    "to_teach": _COLORS[6],
    "judge": _COLORS[7],
    "to_judge": _COLORS[7],
    "trainer": _COLORS[2],
    "scored": _COLORS[2],
    "trained": _COLORS[2],
    "held out": _COLORS[3],
    "weights": _COLORS[4],
    "bound": _COLORS[5],
    "dead": _COLORS[5],
}
_MOST_NAMES = 5
_OFTEN = ("Checkpoints",)
_NONE = "-"

Panel = Mapping[str, Any]


def draw(axes: Axes, panel: Panel, series: Sequence[Series], times: Values, marks: Sequence[Mark] = ()) -> None:
    """Draw one panel of any kind but a row. marks: lines across graphs."""
    axes.set_facecolor(PANEL)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _KINDS[str(panel["type"])](axes, panel, series, times)
    if panel["type"] == "timeseries":
        for mark in marks:
            _mark(axes, mark)


def _mark(axes: Axes, mark: Mark) -> None:
    """A triangle below, as in Grafana; a line only for what is rare."""
    color, places = _NAMED[mark.color], axes.get_xaxis_transform()
    axes.plot(mark.at_s, 0.0, marker="^", markersize=3, color=color, transform=places, clip_on=False, label="_")
    if mark.name not in _OFTEN:
        axes.axvline(mark.at_s, color=color, linewidth=0.7, linestyle=(0, (3, 3)), alpha=0.8, label="_")


def in_unit(value: float, unit: str) -> str:
    """A number as a person reads it."""
    if not math.isfinite(value):
        return _NONE
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return _seconds(value)
    if unit in {"bytes", "Bps"}:
        power = 0 if value == 0 else min(4, max(0, int(math.log(abs(value), 1024))))
        return f"{value / 1024**power:.3g} {('', 'Ki', 'Mi', 'Gi', 'Ti')[power]}B{'/s' if unit == 'Bps' else ''}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}"


def _seconds(value: float) -> str:
    if value and abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 120 else f"{value / 60:.3g} min"


def _unit(panel: Panel) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", "short"))


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


def _title(axes: Axes, panel: Panel, *, size: float = 8.5) -> None:
    axes.set_title(panel["title"], loc="left", color=TEXT, fontsize=size, fontweight="bold", pad=5)


def _tile(axes: Axes, panel: Panel, series: Sequence[Series], times: Values) -> None:
    """The last value, large, over the course of the values."""
    _bare(axes)
    _title(axes, panel)
    here = [item for item in series if math.isfinite(item.values[-1])] or list(series)
    if not here:
        axes.text(0.5, 0.45, _NONE, color=FAINT, fontsize=20, ha="center", va="center", transform=axes.transAxes)
        return
    shown = here[0]
    text, color = _tile_text(panel, shown)
    if panel["options"].get("graphMode") == "area":
        low = np.nanmin(shown.values) if np.isfinite(shown.values).any() else 0.0
        axes.fill_between(times, shown.values, low, color=color, alpha=0.18, linewidth=0)
        axes.plot(times, shown.values, color=color, linewidth=0.8, alpha=0.7)
        span = max(np.nanmax(shown.values) - low, 1e-9) if np.isfinite(shown.values).any() else 1.0
        axes.set_ylim(low, low + 2.6 * span)
        axes.set_xlim(times[0], times[-1])
    axes.text(
        0.5, 0.55, text, color=color, fontsize=17, fontweight="bold", ha="center", va="center", transform=axes.transAxes
    )


def _tile_text(panel: Panel, series: Series) -> tuple[str, str]:
    defaults = panel["fieldConfig"]["defaults"]
    value = series.last
    words = {key: item for mapping in defaults.get("mappings", ()) for key, item in mapping["options"].items()}
    if (word := words.get(f"{value:g}")) is not None:
        return str(word["text"]), _NAMED[word["color"]]
    color = "blue"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    if panel["options"].get("textMode") == "name":
        return series.name, _NAMED[color]
    decimals = defaults.get("decimals")
    if decimals is not None and _unit(panel) == "short" and math.isfinite(value):
        return f"{value:.{decimals}f}", _NAMED[color]
    return in_unit(value, _unit(panel)), _NAMED[color]


def _graph(axes: Axes, panel: Panel, series: Sequence[Series], times: Values) -> None:
    """Lines, or areas on top of each other."""
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    there = [item for item in series if np.isfinite(item.values).any()]
    there.sort(key=lambda item: not np.nan_to_num(item.values).any())  # what is 0 all the time is named last
    colors = _colors_of([item.name for item in there])
    if custom.get("stacking", {}).get("mode") == "normal" and there:
        heights = np.nan_to_num(np.stack([item.values for item in there]))  # [series, N]
        axes.stackplot(times, heights, colors=colors, alpha=0.55, linewidth=0, labels=[item.name for item in there])
    else:
        for item, color in zip(there, colors, strict=True):
            axes.plot(times, item.values, color=color, linewidth=1.1, label=item.name)
            axes.fill_between(times, item.values, 0, color=color, alpha=0.06, linewidth=0)
    _axis(axes, panel, times)
    if there:
        _legend(axes, len(there))


def _colors_of(names: Sequence[str]) -> list[str]:
    """A colour for each name; another than those of known names where it is not known."""
    known = [_COLOR_OF.get(name) for name in names]
    free = [color for color in _COLORS if color not in known] or list(_COLORS)
    given = iter(free * (len(names) // len(free) + 1))
    return [color or next(given) for color in known]


def _axis(axes: Axes, panel: Panel, times: Values) -> None:
    defaults, unit = panel["fieldConfig"]["defaults"], _unit(panel)
    _title(axes, panel)
    axes.set_xlim(times[0], times[-1])
    bottom, top = axes.get_ylim()
    axes.set_ylim(defaults.get("min", bottom), defaults.get("max", max(top, bottom + 1e-9)))
    axes.tick_params(colors=FAINT, labelsize=6.5, length=0, pad=2)
    axes.tick_params(axis="x", pad=4)
    axes.grid(visible=True, color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_unit(value, unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02d}"))


def _legend(axes: Axes, num_series: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    more = [f"and {num_series - _MOST_NAMES} more"] if num_series > _MOST_NAMES else []
    axes.legend(
        handles[: _MOST_NAMES + len(more)],
        [*(label[-32:] for label in labels[:_MOST_NAMES]), *more],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=3,
        fontsize=6,
        frameon=False,
        labelcolor=FAINT,
        handlelength=1.0,
        columnspacing=1.0,
    )


def _heat(axes: Axes, panel: Panel, series: Sequence[Series], times: Values) -> None:
    """Buckets from below to above; brighter is more."""
    ordered = sorted(series, key=lambda item: float(item.labels["le"]))
    counts = np.nan_to_num(np.stack([item.values for item in ordered])) if ordered else np.zeros((1, len(times)))
    each = np.diff(counts, axis=0, prepend=0.0).clip(min=0.0)  # [buckets, N]
    used = np.flatnonzero(each.sum(axis=1))
    if len(used):
        each, ordered = each[used[0] : used[-1] + 1], ordered[used[0] : used[-1] + 1]
    axes.pcolormesh(
        times, np.arange(len(each)), np.where(each > 0, np.sqrt(each), np.nan), cmap="viridis", shading="nearest"
    )
    _axis(axes, {**panel, "fieldConfig": {"defaults": {}}}, times)
    axes.grid(visible=False)
    axes.set_ylim(-0.5, max(len(each), 1) - 0.5)
    unit = str(panel["options"].get("yAxis", {}).get("unit", "short"))
    names = [in_unit(float(item.labels["le"]), unit) if item.labels["le"] != "+Inf" else "more" for item in ordered]
    axes.set_yticks(np.arange(len(names)), names)


def _table(axes: Axes, panel: Panel, series: Sequence[Series], times: Values) -> None:
    """Labels of the series that are there at the end."""
    _bare(axes)
    _title(axes, panel)
    there = [item for item in series if math.isfinite(item.values[-1])]
    columns = sorted({name for item in there for name in item.labels})
    rows = [columns, *sorted([item.labels.get(name, "") for name in columns] for item in there)]
    for number, row in enumerate(rows[:12]):
        for place, text in enumerate(row):
            axes.text(
                0.02 + place / max(len(columns), 1),
                0.93 - number * 0.085,
                text,
                color=FAINT if number == 0 else TEXT,
                fontsize=7,
                va="top",
                transform=axes.transAxes,
            )


_KINDS: dict[str, Callable[[Axes, Panel, Sequence[Series], Values], None]] = {
    "stat": _tile,
    "timeseries": _graph,
    "heatmap": _heat,
    "table": _table,
}
