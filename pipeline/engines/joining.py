"""Which completions get a row next, and which of them are read together.

In: groups that wait, and free rows. Out: batches for one forward pass each. Completions that begin
at the prompt read it once for all; one that was begun elsewhere reads its own tokens behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.engines.rows import GroupTask, Ints
from pipeline.messages import TokenIds

_PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joining:
    """Completions of one group that join behind the same tokens.

    members: their indices. token_ids: [P], or [P + T] where the only member has T tokens already.
    """

    task: GroupTask
    members: tuple[int, ...]
    token_ids: TokenIds
    is_begun: bool = False

    @property
    def is_read(self) -> bool:
        """Whether keys and values of its tokens are there."""
        return self.task.prefix is not None and not self.is_begun


def next_to_join(waiting: Iterable[GroupTask], free: int) -> list[Joining]:
    """Whoever takes the `free` rows, in the order of submission; they no longer count as waiting."""
    joining: list[Joining] = []
    for task in waiting:
        if free <= 0:
            break
        members, task.waiting = task.waiting[:free], task.waiting[free:]
        free -= len(members)
        joining += _joining(task, members)
    return joining


def _joining(task: GroupTask, members: Sequence[int]) -> list[Joining]:
    prompt_ids = task.prompt.prompt_token_ids
    fresh = tuple(index for index in members if task.begun(index) is None)
    joining = [Joining(task=task, members=fresh, token_ids=prompt_ids)] if fresh else []
    for index in members:
        if (begun := task.begun(index)) is not None:
            token_ids = np.concatenate([prompt_ids, begun.token_ids])
            joining.append(Joining(task=task, members=(index,), token_ids=token_ids, is_begun=True))
    return joining


def prefill_batches(joining: Sequence[Joining]) -> list[list[Joining]]:
    """Prompts of like length are read together; a prefix that was kept is used as it is."""
    batches = [[join] for join in joining if join.is_read]
    rest = [join for join in joining if not join.is_read]
    current: list[Joining] = []
    for join in sorted(rest, key=lambda join: len(join.token_ids), reverse=True):
        width = len((current or [join])[0].token_ids)
        if current and width * (len(current) + 1) > _PREFILL_TOKENS:
            batches.append(current)
            current = []
        current.append(join)
    return [*batches, current] if current else batches


def padded(texts: Sequence[TokenIds]) -> Ints:
    """Ids of all texts, padded on the right with 0, [n, longest]."""
    ids = np.zeros((len(texts), max(len(text) for text in texts)), dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return ids
