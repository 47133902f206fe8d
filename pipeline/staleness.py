"""How old every token of a group is, and what follows from it.

In: a scored group and the trainer's weight version. Out: an `Assessment`: an age and a mask for
every token, and whether the group is kept. Ages come from the version spans that the engine wrote,
never from a clock or from the version under which the prompt was fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.config import StalenessSettings
from pipeline.errors import MessageError
from pipeline.messages import Completion, Mask, ScoredGroup

Ages: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assessment:
    """What the staleness policy makes of one group. Counts are of tokens that the policy wrote.

    keep: False drops the group whole. token_ages: for each completion [T], in weight versions.
    masks: for each completion [T], 1 where the token may be trained on.
    num_tokens: all; num_over: older than the bound, each of them either num_corrected (left to the
    importance correction) or num_masked (masked, or dropped with its group).
    max_age, mean_age: over all tokens; 0 without tokens.
    """

    keep: bool
    token_ages: tuple[Ages, ...]
    masks: tuple[Mask, ...]
    num_tokens: int
    num_over: int
    num_corrected: int
    num_masked: int
    max_age: int
    mean_age: float


def assess(group: ScoredGroup, trainer_version: int, settings: StalenessSettings) -> Assessment:
    """Weigh every token of `group` against the bound `settings.max_staleness`.

    staleness(token) = trainer_version - version that sampled the token; a token at the bound is
    within it. The policy acts per token: a sequence over three versions may be old at its start
    and fresh at its end. "drop" drops the group when one token is over the bound.

    Raises MessageError when a token claims weights newer than the trainer's.
    """
    completions = group.rollout.completions
    token_ages = tuple(_ages(group, completion, trainer_version) for completion in completions)
    written = tuple(completion.loss_mask != 0 for completion in completions)
    is_over = tuple((ages > settings.max_staleness) & mask for ages, mask in zip(token_ages, written, strict=True))
    num_over = int(sum(over.sum() for over in is_over))
    keep = settings.policy != "drop" or num_over == 0
    is_masked = settings.policy != "correct"
    pooled = _pool(token_ages, written)
    return Assessment(
        keep=keep,
        token_ages=token_ages,
        masks=tuple(
            (mask & keep & ~(over & is_masked)).astype(np.uint8) for mask, over in zip(written, is_over, strict=True)
        ),
        num_tokens=len(pooled),
        num_over=num_over,
        num_corrected=0 if is_masked else num_over,
        num_masked=num_over if is_masked else 0,
        max_age=int(pooled.max(initial=0)),
        mean_age=float(pooled.mean()) if len(pooled) else 0.0,
    )


def version_range(group: ScoredGroup) -> tuple[int, int] | None:
    """Oldest and newest version among the tokens that the policy wrote; None where it wrote none."""
    written = [item.token_versions[item.loss_mask != 0] for item in group.rollout.completions]
    versions = np.concatenate(written) if written else np.zeros(0, dtype=np.int64)
    return (int(versions.min()), int(versions.max())) if len(versions) else None


def _ages(group: ScoredGroup, completion: Completion, trainer_version: int) -> Ages:
    ages = trainer_version - completion.token_versions  # [T]
    if len(ages) and ages.min() < 0:
        raise MessageError(
            f"group {group.rollout.prompt.group_id}: a token was sampled by weight version "
            f"{trainer_version - int(ages.min())}, but the trainer is at {trainer_version}; "
            "its generator follows another trainer"
        )
    return ages


def _pool(token_ages: Sequence[Ages], written: Sequence[npt.NDArray[np.bool_]]) -> Ages:
    """Ages of all tokens that the policy wrote, [num_tokens]."""
    parts = [ages[mask] for ages, mask in zip(token_ages, written, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
