"""Completions that end because of a text, which may lie across tokens.

In: the rows in flight and a tokenizer's way to decode. Out: which of them end in one of their texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pipeline.engines.rows import Bools, Rows


def ends_in_stop_text(rows: Rows, decode: Callable[[list[list[int]]], list[str]]) -> Bools:
    """For each active row whether its newest tokens hold one of its stop texts, [n]."""
    has_stop = rows.active["has_stop"]
    found = np.zeros(len(has_stop), dtype=bool)
    chosen = np.flatnonzero(has_stop).tolist()
    if not chosen:
        return found
    stops = [rows.member(row)[0].prompt.sampling.stop for row in chosen]
    # A character is at most four tokens of a byte-level vocabulary.
    windows = [4 * max(len(text) for text in stop) + 4 for stop in stops]
    tails = decode([rows.token_ids(row, window) for row, window in zip(chosen, windows, strict=True)])
    found[chosen] = [any(text in tail for text in stop) for tail, stop in zip(tails, stops, strict=True)]
    return found


def before_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of its stop texts."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text
