"""Everything a demo run needs on disk.

In: a directory and a seed. Out: a model that answers about half of the questions, prompts to train
on, prompts held out. The seed chooses the training prompts; start and held-out prompts are always
the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.demo.task import make_words, row


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """model: a Hugging Face model directory. training, held_out: JSONL files."""

    model: Path
    training: Path
    held_out: Path


def prepare(directory: Path, seed: int) -> Prepared:
    """Make and train the start, write the data. Takes seconds."""
    from pipeline.demo.cold_start import cold_start

    directory.mkdir(parents=True, exist_ok=True)
    words = make_words(seed=seed)
    prepared = Prepared(
        model=directory / "model", training=directory / "train.jsonl", held_out=directory / "held_out.jsonl"
    )
    _write(prepared.training, words.training)
    _write(prepared.held_out, words.held_out)
    cold_start(prepared.model, words.supervised)
    return prepared


def _write(file: Path, words: Iterable[str]) -> None:
    file.write_text("".join(json.dumps(row(word)) + "\n" for word in words), encoding="utf-8")
