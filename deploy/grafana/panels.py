"""Kinds of panels: tiles with one value, graphs over time, heat maps of histograms, tables.

In: a title, queries and what to look for. Out: builders of Grafana's SDK. All boards get their
panels here, so that they look and behave alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import FieldColor, ThresholdsConfig
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.heatmap import HeatmapColorOptions as HeatmapColor
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel = Builder[dashboard.Panel]

SECONDS, RATIO, BYTES, BYTES_PER_S, PLAIN = "s", "percentunit", "bytes", "Bps", "short"
SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
TILES_IN_A_ROW = 8
_COLUMNS, _TILE_HEIGHT, _GRAPH_HEIGHT = 24, 4, 8


@dataclass(frozen=True, slots=True)
class Query:
    """expr: PromQL, with the board's variables. legend: name of a series, by its labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Values from which a tile is yellow, and red. is_low: below them instead."""

    yellow: float
    red: float
    is_low: bool = False


def tile(
    title: str,
    expr: str,
    look_for: str,
    *,
    unit: str = PLAIN,
    decimals: int | None = None,
    limits: Limits | None = None,
    words: Mapping[int, tuple[str, str]] | None = None,
    shows_name: bool = False,
    legend: str = "",
) -> Panel:
    """One value, eight to a row. words: value -> text and colour. shows_name: the series' name instead of a value."""
    target = _target(0, Query(expr, legend))
    panel = (
        stat.Panel()
        .title(title)
        .description(look_for)
        .datasource(SOURCE)
        .with_target(target.instant() if shows_name else target)
        .span(_COLUMNS // TILES_IN_A_ROW)
        .height(_TILE_HEIGHT)
        .unit(unit)
        .no_value("-")
        .color_mode(options.BigValueColorMode.VALUE)
        .graph_mode(options.BigValueGraphMode.NONE if words or shows_name else options.BigValueGraphMode.AREA)
        .text_mode(options.BigValueTextMode.NAME if shows_name else options.BigValueTextMode.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(limits))
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if words is not None:
        texts = {
            str(value): dashboard.ValueMappingResult(text=text, color=color) for value, (text, color) in words.items()
        }
        panel = panel.mappings([dashboard.ValueMap(options=texts)])
    return panel


def _thresholds(limits: Limits | None) -> ThresholdsConfig:
    steps: list[tuple[float | None, str]]
    if limits is None:
        steps = [(None, "blue")]
    elif limits.is_low:
        steps = [(None, "red"), (limits.red, "yellow"), (limits.yellow, "green")]
    else:
        steps = [(None, "green"), (limits.yellow, "yellow"), (limits.red, "red")]
    return (
        ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=color) for value, color in steps])
    )


def graph(
    title: str,
    look_for: str,
    *queries: Query,
    unit: str = PLAIN,
    width: int = 8,
    is_stacked: bool = False,
    starts_at_zero: bool = True,
    highest: float | None = None,
) -> Panel:
    """Values over time. width: of 24 columns. highest: end of the axis."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(look_for)
        .datasource(SOURCE)
        .targets([_target(number, query) for number, query in enumerate(queries)])
        .span(width)
        .height(_GRAPH_HEIGHT)
        .unit(unit)
        .color_scheme(FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .line_width(1)
        .fill_opacity(40 if is_stacked else 8)
        .show_points(options.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING))
    )
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    if starts_at_zero:
        panel = panel.min(0)
    return panel if highest is None else panel.max(highest)


def heat(title: str, look_for: str, expr: str, *, unit: str = SECONDS, width: int = 8) -> Panel:
    """A histogram over time. expr: increase of its buckets by `le`."""
    target = _target(0, Query(expr, "{{le}}")).format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(look_for)
        .datasource(SOURCE)
        .with_target(target)
        .span(width)
        .height(_GRAPH_HEIGHT)
        .calculate(False)
        .color(_HeatmapColors())
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .mode(options.TooltipDisplayMode.SINGLE)
        .show_color_scale(False)
    )


class _HeatmapColors(Builder[HeatmapColor]):
    def build(self) -> HeatmapColor:
        return HeatmapColor(mode=HeatmapColorMode.SCHEME, scheme="Viridis", steps=64, fill="dark-orange", exponent=0.5)


def listing(title: str, look_for: str, expr: str, *, hidden: tuple[str, ...], width: int = 24) -> Panel:
    """The labels of the series there are now, as a table. hidden: labels that say nothing here."""
    target = _target(0, Query(expr)).instant().format(PromQueryFormat.TABLE)
    columns = {name: True for name in ("Time", "Value", *hidden)}
    return (
        table.Panel()
        .title(title)
        .description(look_for)
        .datasource(SOURCE)
        .with_target(target)
        .with_transformation(
            dashboard.DataTransformerConfig(id_val="organize", options={"excludeByName": columns, "indexByName": {}})
        )
        .span(width)
        .height(_GRAPH_HEIGHT)
    )


def _target(number: int, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id("ABCDEFGH"[number]).datasource(SOURCE).range()
    return target.legend_format(query.legend) if query.legend else target
