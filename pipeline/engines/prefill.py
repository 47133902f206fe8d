"""Which prompts are read together, and how they lie in one batch.

In: groups whose completions join the decode loop. Out: batches of prompts of like length, bounded in
tokens, and their padded ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from pipeline.engines.rows import GroupTask, Ints
from pipeline.messages import TokenIds

Joining: TypeAlias = tuple[GroupTask, int]  # a group, and how many of its completions join now

_PREFILL_TOKENS = 8192


def prefill_batches(joining: Sequence[Joining]) -> list[list[Joining]]:
    """Prompts of like length are read together; a prefix that was kept is used as it is."""
    batches = [[join] for join in joining if join[0].prefix is not None]
    rest = [join for join in joining if join[0].prefix is None]
    current: list[Joining] = []
    for join in sorted(rest, key=lambda join: len(join[0].prompt.prompt_token_ids), reverse=True):
        width = len((current or [join])[0][0].prompt.prompt_token_ids)
        if current and width * (len(current) + 1) > _PREFILL_TOKENS:
            batches.append(current)
            current = []
        current.append(join)
    return [*batches, current] if current else batches


def padded(prompts: Sequence[TokenIds]) -> Ints:
    """Ids of all prompts, padded on the right with 0, [n, longest]."""
    ids = np.zeros((len(prompts), max(len(prompt) for prompt in prompts)), dtype=np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids
