"""One completion as the trainer sees it.

In: scored groups in feeding order and their assessments. Out: one `Sample` for each completion, with
the tokens to train on. Token ids are those that were generated, never text that was tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.errors import MessageError
from pipeline.filters import rewards_of
from pipeline.messages import Completion, Floats, PromptGroup, Score, ScoredGroup, TokenIds
from pipeline.staleness import Ages, Assessment

BoolMask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One completion as the trainer sees it.

    prompt_token_ids: [P]. mask: [T], tokens to train on. ages: [T], in weight versions.
    reward: None where not scored. score: what it was made of. max_tokens: limit of the completion.
    group_index: position of the group in the step.
    num_nonfinite: tokens left out for a generator logprob that is not finite.
    num_unreplayed: tokens to train on that were sampled by a truncated distribution whose mask is missing.
    """

    prompt_token_ids: TokenIds
    completion: Completion
    mask: BoolMask
    ages: Ages
    temperature: float
    reward: float | None
    score: Score
    max_tokens: int
    group_index: int
    num_nonfinite: int
    num_unreplayed: int

    @property
    def num_tokens(self) -> int:
        """Tokens to train on."""
        return int(self.mask.sum())

    @property
    def teacher_logprobs(self) -> Floats:
        """[T], NaN where no teacher has said anything."""
        said = self.score.teacher_logprobs
        return np.full(len(self.completion), np.nan, dtype=np.float32) if said is None else np.array(said)

    @property
    def num_untaught(self) -> int:
        """Tokens to train on of which no teacher has said anything."""
        return int((self.mask & np.isnan(self.teacher_logprobs)).sum())

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_token_ids) + len(self.completion)

    @property
    def num_read(self) -> int:
        """Tokens of the completion that the model must read: those before the last one to train on."""
        return int(self.mask.nonzero()[0].max(initial=0))


def make_samples(groups: Sequence[ScoredGroup], assessments: Sequence[Assessment]) -> list[Sample]:
    """One sample for each completion, in order. Raises MessageError for an empty prompt."""
    samples = []
    for group_index, (group, assessment) in enumerate(zip(groups, assessments, strict=True)):
        prompt = group.rollout.prompt
        _check(prompt)
        for completion, reward, score, kept, ages in zip(
            group.rollout.completions,
            rewards_of(group),
            group.scores,
            assessment.masks,
            assessment.token_ages,
            strict=True,
        ):
            is_wanted = (kept != 0) & (reward is not None or score.teacher_logprobs is not None)
            mask = is_wanted & np.isfinite(completion.generator_logprobs)
            has_gap = prompt.sampling.is_truncated and completion.sampling_mask is None
            samples.append(
                Sample(
                    prompt_token_ids=prompt.prompt_token_ids,
                    completion=completion,
                    mask=mask,
                    ages=ages,
                    temperature=prompt.sampling.temperature,
                    reward=reward,
                    score=score,
                    max_tokens=prompt.sampling.max_tokens,
                    group_index=group_index,
                    num_nonfinite=int(is_wanted.sum() - mask.sum()),
                    num_unreplayed=int(mask.sum()) if has_gap else 0,
                )
            )
    return samples


def _check(prompt: PromptGroup) -> None:
    assert not prompt.is_evaluation, "evaluation groups are never trained on"
    assert prompt.sampling.temperature > 0, "a greedy completion has no probability to train on"
    if not len(prompt.prompt_token_ids):
        raise MessageError(f"group {prompt.group_id}: an empty prompt predicts no first token")
