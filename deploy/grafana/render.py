"""A picture of a board without a Grafana: `python -m deploy.grafana.render --run NAME`.

In: a Prometheus that has watched a run. Out: a PNG in which every panel of the board shows what its
queries answer. Nothing is sampled or invented: a panel without data is empty.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from deploy.grafana.answers import Window
from deploy.grafana.build import DASHBOARDS
from deploy.grafana.drawing import BACK, FAINT, PANEL, TEXT, draw

_COLUMNS = 24
_INCHES_PER_COLUMN, _INCHES_PER_ROW = 0.6, 0.27
_HEAD_ROWS = 2.2
_NUM_COLORS = 256


def panels_of(board: dict[str, Any], num_rows: int | None) -> list[dict[str, Any]]:
    """Tiles and the first `num_rows` rows with their panels; None: all."""
    shown, rows = [], 0
    for panel in board["panels"]:
        rows += panel["type"] == "row"
        if num_rows is not None and rows > num_rows:
            break
        shown.append(panel)
    return shown


def picture(board: dict[str, Any], panels: Sequence[dict[str, Any]], window: Window) -> Figure:
    """The board as a figure."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) + _HEAD_ROWS
    figure = Figure(figsize=(_COLUMNS * _INCHES_PER_COLUMN, height * _INCHES_PER_ROW), facecolor=BACK)
    minutes = (window.end - window.start) / 60
    figure.text(0.008, 1 - 1.3 / height, board["title"], color=TEXT, fontsize=14, fontweight="bold", va="center")
    said = f"run {window.run}, {minutes:.0f} minutes"
    figure.text(0.992, 1 - 1.3 / height, said, color=FAINT, fontsize=9, va="center", ha="right")
    marks = window.marks(board)
    for panel in panels:
        place = panel["gridPos"]
        left, bottom = place["x"] / _COLUMNS, 1 - (place["y"] + place["h"] + _HEAD_ROWS) / height
        wide, high = place["w"] / _COLUMNS, place["h"] / height
        if panel["type"] == "row":
            figure.text(left + 0.008, bottom + high / 2, panel["title"], color=TEXT, fontsize=10, va="center")
            continue
        gap_x, gap_y = 0.003, 0.18 / height
        frame = figure.add_axes((left + gap_x, bottom + gap_y, wide - 2 * gap_x, high - 2 * gap_y), facecolor=PANEL)
        frame.set(xticks=[], yticks=[])
        for spine in frame.spines.values():
            spine.set_visible(False)
        is_tile = panel["type"] in {"stat", "table"}
        edges = (0.006, 0.006, 0.25, 1.15) if is_tile else (0.042, 0.012, 2.1, 1.4)
        axes = figure.add_axes(
            (
                left + edges[0],
                bottom + edges[2] / height,
                wide - edges[0] - edges[1],
                high - (edges[2] + edges[3]) / height,
            )
        )
        draw(axes, panel, window.series(panel), window.times, marks)
    return figure


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a PNG with a palette, which is a third of the size."""
    from PIL import Image

    figure.savefig(path, dpi=dpi, facecolor=BACK)
    with Image.open(path) as full:
        full.convert("RGB").quantize(_NUM_COLORS).save(path, optimize=True)


def main(words: Sequence[str]) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.render", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--board", default="overview", choices=sorted(path.stem for path in DASHBOARDS.glob("*.json")))
    parser.add_argument("--url", default="http://localhost:9090", help="of the Prometheus")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long a time to show")
    parser.add_argument("--end", type=float, default=None, help="Unix time at which it ends; now by default")
    parser.add_argument("--rate", type=float, default=20.0, help="seconds that rates are taken over: four scrapes")
    parser.add_argument("--rows", type=int, default=None, help="only the first so many rows")
    parser.add_argument("--dpi", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None, help="file to write; BOARD.png by default")
    asked = parser.parse_args(words)
    end = time.time() if asked.end is None else asked.end
    window = Window(url=asked.url, run=asked.run, start=end - 60 * asked.minutes, end=end, rate_s=asked.rate)
    board = json.loads((DASHBOARDS / f"{asked.board}.json").read_text(encoding="utf-8"))
    path = asked.out or Path(f"{asked.board}.png")
    try:
        save(picture(board, panels_of(board, asked.rows), window), path, asked.dpi)
    except RuntimeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
