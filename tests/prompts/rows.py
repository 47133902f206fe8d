"""Small data sets and sources for the tests of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.messages import Prompt, SamplingParams
from pipeline.prompts import Dataset, PromptOrder, PromptSource, Row

SAMPLING = SamplingParams(group_size=4, max_tokens=8, seed=7)


def letters(prompt: Prompt) -> list[int]:
    """One token for each character."""
    return [ord(letter) for letter in str(prompt)]


def dataset(texts: Sequence[str]) -> Dataset:
    """Rows with nothing but a prompt."""
    return Dataset("words", [Row(number=i, prompt=text, columns={}) for i, text in enumerate(texts, 1)])


def source(
    texts: Sequence[str], *, max_prompt_tokens: int = 100, shuffle: bool = True, epochs: int = 0
) -> PromptSource:
    """A source over `texts`, a token for each character."""
    return PromptSource(
        dataset(texts),
        PromptOrder(len(texts), seed=3, shuffle=shuffle, epochs=epochs),
        encode=letters,
        sampling=SAMPLING,
        max_prompt_tokens=max_prompt_tokens,
    )


def write(file: Path, *lines: str) -> str:
    """A file of lines; returns its path."""
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(file)
