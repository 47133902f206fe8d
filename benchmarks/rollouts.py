"""Real groups of about 2 KiB, for benchmarks of what carries them.

In: a number, or a rollout as it travels. Out: its bytes, and those of the group with its scores.
"""

from __future__ import annotations

import numpy as np

from pipeline.messages import (
    Completion,
    FinishReason,
    Outcome,
    PromptGroup,
    RewardResult,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    VersionSpan,
)
from pipeline.wire import decode, encode

_GROUP_SIZE, _TOKENS = 4, 36


def rollout_payload(ordinal: int) -> bytes:
    """A prompt and its four completions of 36 tokens."""
    prompt = PromptGroup(
        group_id=f"{ordinal:08d}",
        ordinal=ordinal,
        dataset_index=ordinal,
        epoch=0,
        prompt="What is 3 + 4?",
        prompt_token_ids=np.arange(16, dtype=np.uint32),
        columns={"answer": "7"},
        sampling=SamplingParams(group_size=_GROUP_SIZE, max_tokens=_TOKENS),
        fed_version=0,
        min_version=0,
    )
    completion = Completion(
        token_ids=np.arange(_TOKENS, dtype=np.uint32),
        generator_logprobs=np.full(_TOKENS, -1.0, dtype=np.float32),
        loss_mask=np.ones(_TOKENS, dtype=np.uint8),
        spans=(VersionSpan(weight_version=0, first_token=0),),
        finish_reason=FinishReason.STOP,
        text="The answer is 7.",
    )
    return encode(RolloutGroup(prompt=prompt, completions=(completion,) * _GROUP_SIZE, generator="generator-0"))


def scored_payload(payload: bytes) -> bytes:
    """The same group with a reward for each completion, as a scorer sends it on."""
    rollout = decode(payload, RolloutGroup)
    part = RewardResult(name="exact_match", value=1.0, outcome=Outcome.OK)
    scores = tuple(Score(reward=1.0, parts=(part,)) for _ in rollout.completions)
    return encode(ScoredGroup(rollout=rollout, scores=scores, scorer="scorer-0"))
