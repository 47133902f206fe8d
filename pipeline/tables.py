"""Aligned columns, as all commands print them.

In: headers and rows. Out: lines without trailing blanks.
"""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The headers, then a line for each row; each column as wide as its widest cell."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headers))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
