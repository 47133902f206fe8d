"""What workers hand each other: prompt groups, rollout groups, scored groups, weight addresses.

In: what the feeder, generators and scorers know. Out: frozen carriers that the next stage reads.
They hold no behaviour beyond derived views; `pipeline.wire` turns them into bytes and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = 1

TokenIds: TypeAlias = npt.NDArray[np.uint32]
Floats: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.uint8]
ExpertIds: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Prompt: TypeAlias = str | list[dict[str, str]]
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


class Outcome(StrEnum):
    """What became of one reward function on one completion."""

    OK = "ok"
    NONE = "none"
    ERROR = "error"
    TIMEOUT = "timeout"

    @property
    def is_failure(self) -> bool:
        """Whether nothing is known of the completion, where the function should have said something."""
        return self in {Outcome.ERROR, Outcome.TIMEOUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one group is sampled.

    group_size: completions. temperature: 0 is greedy. top_k: 0 is off. max_tokens: per completion.
    seed: base; completion i of group g uses a seed made of (seed, group ordinal, i).
    keep_sampling_mask: whether the ids that survived top-p and top-k are to be returned.
    keep_routed_experts: whether the experts that the routers chose are to be returned.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0
    keep_sampling_mask: bool = False
    keep_routed_experts: bool = False

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptGroup:
    """One prompt on its way to be completed `sampling.group_size` times.

    group_id: unique in the run. ordinal: position in the feeding order, from 0.
    dataset_index: row. epoch: pass over the data, from 0. prompt: as in the data set, for rewards.
    prompt_token_ids: [P], chat template applied. columns: the row's other columns.
    fed_version: trainer's weight version when fed. min_version: generate with this or newer.
    is_evaluation: reported, never trained on. hops: station -> Unix seconds.
    """

    group_id: str
    ordinal: int
    dataset_index: int
    epoch: int
    prompt: Prompt
    prompt_token_ids: TokenIds
    columns: Mapping[str, Json]
    sampling: SamplingParams
    fed_version: int
    min_version: int
    is_evaluation: bool = False
    hops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens from `first_token` on (up to the next span) were sampled by `weight_version`."""

    weight_version: int
    first_token: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingMask:
    """Which ids could be drawn at each token, for replay in the trainer.

    kept_ids: [sum(num_kept)], the ids of token 0, then of token 1, ... num_kept: [T].
    """

    kept_ids: TokenIds
    num_kept: TokenIds


def expert_dtype(num_experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest type that holds every id below `num_experts`, little-endian."""
    return np.dtype(np.uint8) if num_experts <= 1 << 8 else np.dtype("<u2")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedExperts:
    """Which experts the routers chose for every token that the generator read, for replay in the trainer.

    ids: [P + T - 1, layers, top_k], prompt and completion but for the last token, which was drawn and
    never read; of the layers only those that have a router. num_experts: of each layer.
    """

    ids: ExpertIds
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sampled completion.

    token_ids: [T]. generator_logprobs: [T], of the distribution really sampled from.
    loss_mask: [T], 1 where the policy wrote the token. spans: cover all T tokens, in order.
    text: decoded, without special tokens. sampling_mask, routed_experts: only where asked for.
    """

    token_ids: TokenIds
    generator_logprobs: Floats
    loss_mask: Mask
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    text: str
    sampling_mask: SamplingMask | None = None
    routed_experts: RoutedExperts | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def token_versions(self) -> npt.NDArray[np.int64]:
        """Weight version of every token, [T]."""
        return _token_versions(self.spans, len(self))


def _token_versions(spans: tuple[VersionSpan, ...], num_tokens: int) -> npt.NDArray[np.int64]:
    starts = [span.first_token for span in spans] + [num_tokens]
    return np.repeat(np.array([span.weight_version for span in spans], dtype=np.int64), np.diff(np.array(starts)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnfinishedCompletion:
    """The first tokens of a completion that was interrupted; fields as in `Completion`."""

    token_ids: TokenIds
    generator_logprobs: Floats
    spans: tuple[VersionSpan, ...]
    sampling_mask: SamplingMask | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def token_versions(self) -> npt.NDArray[np.int64]:
        """Weight version of every token, [T]."""
        return _token_versions(self.spans, len(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialGroup:
    """What an interrupted engine had of a group, for another one to go on from.

    finished, unfinished: index in the group -> completion; those of which there was no token are in neither.
    """

    prompt: PromptGroup
    finished: Mapping[int, Completion]
    unfinished: Mapping[int, UnfinishedCompletion]

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(map(len, self.finished.values())) + sum(map(len, self.unfinished.values()))

    @property
    def newest_version(self) -> int:
        """Weights of the last token of those to go on from; 0 without any."""
        return max((item.spans[-1].weight_version for item in self.unfinished.values()), default=0)

    def fits(self, prompt: PromptGroup) -> bool:
        """Whether these are completions of this prompt, drawn the way it asks for."""
        ours = self.prompt
        return (ours.group_id, ours.ordinal, ours.sampling) == (
            prompt.group_id,
            prompt.ordinal,
            prompt.sampling,
        ) and np.array_equal(ours.prompt_token_ids, prompt.prompt_token_ids)

    def since(self, oldest_version: int) -> PartialGroup:
        """Without completions that have a token of older weights."""
        return PartialGroup(
            prompt=self.prompt,
            finished={i: item for i, item in self.finished.items() if item.spans[0].weight_version >= oldest_version},
            unfinished={
                i: item for i, item in self.unfinished.items() if item.spans[0].weight_version >= oldest_version
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
    """A prompt and its completions. generator: worker id."""

    prompt: PromptGroup
    completions: tuple[Completion, ...]
    generator: str
    hops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """One reward function on one completion.

    value: None unless outcome is OK, and where it judged tokens instead. problem: why it failed, if it
    did. token_values: [T], None where no step ends; they are summed up in the score and do not travel.
    """

    name: str
    value: float | None
    outcome: Outcome
    problem: str = ""
    token_values: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """What one teacher finds likeliest at every token. token_ids: [T, k]. logprobs: [T, k], -inf without a chance.
    weight: of the divergence from it, where several teach."""

    token_ids: TokenIds
    logprobs: Floats
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Rewards of one completion.

    reward: weighted sum, None where no function applied. parts: each function's own value.
    token_rewards: [T] weighted sum, NaN where no step ends; None where no function judged tokens.
    teacher_logprobs: [T] or None. teacher_top: of each teacher that was asked for more than the sampled tokens.
    """

    reward: float | None
    parts: tuple[RewardResult, ...] = ()
    token_rewards: Floats | None = None
    teacher_logprobs: Floats | None = None
    teacher_top: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """A rollout and one score for each completion. scorer: worker id."""

    rollout: RolloutGroup
    scores: tuple[Score, ...]
    scorer: str
    hops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a publisher is. session: changes when it restarts.

    announce, tiles: ZeroMQ addresses; empty where weights go through files. folder: where they lie then, below the
    reader's own `weights.store`.
    """

    announce: str
    tiles: str
    session: str
    public_key: str = ""
    folder: str = ""


Message: TypeAlias = PromptGroup | RolloutGroup | ScoredGroup | PartialGroup
AnyMessage = TypeVar("AnyMessage", PromptGroup, RolloutGroup, ScoredGroup, PartialGroup)
