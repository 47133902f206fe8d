"""Groups for tests: small, valid, with everything settable that a test is about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.messages import (
    Completion,
    FinishReason,
    Json,
    Outcome,
    PromptGroup,
    RewardResult,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    VersionSpan,
)


def make_prompt(
    ordinal: int = 0,
    *,
    group_id: str | None = None,
    group_size: int = 2,
    version: int = 0,
    min_version: int = 0,
    is_evaluation: bool = False,
    columns: dict[str, Json] | None = None,
    max_tokens: int = 16,
) -> PromptGroup:
    """A prompt of three tokens."""
    return PromptGroup(
        group_id=group_id or f"{ordinal:08d}",
        ordinal=ordinal,
        dataset_index=ordinal,
        epoch=0,
        prompt=f"prompt {ordinal}",
        prompt_token_ids=np.array([5, 6, 7], dtype=np.uint32),
        columns=columns or {},
        sampling=SamplingParams(group_size=group_size, max_tokens=max_tokens),
        fed_version=version,
        min_version=min_version,
        is_evaluation=is_evaluation,
    )


def make_completion(
    num_tokens: int = 4, *, spans: Sequence[tuple[int, int]] = ((0, 0),), text: str = "abc"
) -> Completion:
    """A completion; spans: (weight_version, first_token)."""
    return Completion(
        token_ids=np.arange(num_tokens, dtype=np.uint32),
        generator_logprobs=np.full(num_tokens, -1.0, dtype=np.float32),
        loss_mask=np.ones(num_tokens, dtype=np.uint8),
        spans=tuple(VersionSpan(weight_version=version, first_token=first) for version, first in spans),
        finish_reason=FinishReason.STOP,
        text=text,
    )


def make_rollout(prompt: PromptGroup, *, version: int = 0, num_tokens: int = 4) -> RolloutGroup:
    """Every completion made by one version."""
    completions = tuple(make_completion(num_tokens, spans=[(version, 0)]) for _ in range(prompt.sampling.group_size))
    return RolloutGroup(prompt=prompt, completions=completions, generator="generator-test")


def make_scored(
    prompt: PromptGroup, rewards: Sequence[float | None], *, version: int = 0, num_tokens: int = 4
) -> ScoredGroup:
    """A group with these rewards, one for each completion."""
    scores = tuple(
        Score(
            reward=reward,
            parts=(RewardResult(name="test", value=reward, outcome=Outcome.NONE if reward is None else Outcome.OK),),
        )
        for reward in rewards
    )
    return ScoredGroup(
        rollout=make_rollout(prompt, version=version, num_tokens=num_tokens), scores=scores, scorer="scorer-test"
    )
