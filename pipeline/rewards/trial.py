"""One call of every reward on made-up completions, before a run depends on it.

In: reward settings and a row of the data. Out: what each function said, or a RewardLoadError that says
what it did instead. The functions run where a scorer runs them, under the same time-outs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.config import ScoringSettings
from pipeline.errors import RewardLoadError
from pipeline.filters import ONLY_TOKENS
from pipeline.messages import (
    Completion,
    FinishReason,
    PromptGroup,
    RewardResult,
    RolloutGroup,
    SamplingParams,
    Score,
    VersionSpan,
)
from pipeline.rewards.loading import TrialRow
from pipeline.rewards.pool import RewardPool


def call_rewards(settings: ScoringSettings, row: TrialRow, *, group_size: int) -> list[str]:
    """A line for each reward with what it gave the completions "trial 1", "trial 2" and so on.

    Raises RewardLoadError with a line for each that raised, took too long or returned what is no reward.
    """
    # The caller may or may not run an event loop already; a thread of its own serves both.
    with ThreadPoolExecutor(max_workers=1) as executor:
        scores = executor.submit(asyncio.run, _score(settings, _made_up(row, group_size))).result()
    by_reward = [list(parts) for parts in zip(*(score.parts for score in scores), strict=True)]
    problems = [_complaint(parts, row) for parts in by_reward if any(part.outcome.is_failure for part in parts)]
    if problems:
        raise RewardLoadError("\n".join(problems))
    if all(part.token_values is not None for parts in by_reward for part in parts):
        raise RewardLoadError(f"scoring.rewards: {ONLY_TOKENS}")
    return [f"{parts[0].name} gave {', '.join(map(_shown, parts))} to made-up completions" for parts in by_reward]


async def _score(settings: ScoringSettings, group: RolloutGroup) -> Sequence[Score]:
    pool = RewardPool(settings.model_copy(update={"num_processes": 1}))
    try:
        await pool.start()
        return await pool.score(group)
    finally:
        await pool.close()


def _made_up(row: TrialRow, group_size: int) -> RolloutGroup:
    prompt = PromptGroup(
        group_id="trial",
        ordinal=0,
        dataset_index=0,
        epoch=0,
        prompt=row.prompt,
        prompt_token_ids=np.zeros(1, dtype=np.uint32),
        columns=row.columns,
        sampling=SamplingParams(group_size=group_size, max_tokens=2),
        fed_version=0,
        min_version=0,
    )
    completions = tuple(_completion(f"trial {number}") for number in range(1, group_size + 1))
    return RolloutGroup(prompt=prompt, completions=completions, generator="trial")


def _completion(text: str) -> Completion:
    return Completion(
        token_ids=np.zeros(2, dtype=np.uint32),
        generator_logprobs=np.zeros(2, dtype=np.float32),
        loss_mask=np.ones(2, dtype=np.uint8),
        spans=(VersionSpan(weight_version=0, first_token=0),),
        finish_reason=FinishReason.STOP,
        text=text,
    )


def _complaint(parts: Sequence[RewardResult], row: TrialRow) -> str:
    failed = next(part for part in parts if part.outcome.is_failure)
    return f"scoring.rewards: {failed.name} {failed.problem} (called with {row.where} and made-up completions)"


def _shown(part: RewardResult) -> str:
    if part.token_values is not None:
        return f"{len(part.token_values)} values"
    return "None" if part.value is None else f"{part.value:g}"
