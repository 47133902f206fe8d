"""From vLLM's outputs to completions.

In: the final output of each request that a completion took. Out: one `Completion` with the spans
of the versions that drew it. Also counts tokens as they are drawn, for whoever watches progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.engines import Interrupted
from pipeline.errors import EngineError, NonFiniteError
from pipeline.messages import (
    Completion,
    ExpertIds,
    FinishReason,
    PartialGroup,
    PromptGroup,
    RoutedExperts,
    SamplingMask,
    UnfinishedCompletion,
    VersionSpan,
    expert_dtype,
)

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one request drew. spans: (version, first token of the segment). reason: None where it was broken off.

    experts: of the tokens that it read, those that were asked for, [n, all layers of the decoder, top_k].
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]
    reason: FinishReason | None
    stop_text: str
    kept_ids: list[list[int]] | None
    experts: ExpertIds | None

    @classmethod
    def of(cls, output: Any, *, adapter_version: int | None, has_all_logprobs: bool = False) -> Segment:
        """From vLLM's `CompletionOutput`.

        adapter_version: of the adapter that drew all of it, where there is one. has_all_logprobs: they
        are of all tokens that could be drawn, which then are the sampling mask. Raises EngineError where
        it contradicts itself.
        """
        token_ids, logprobs = list(output.token_ids), _logprobs(output)
        if len(logprobs) != len(token_ids):
            raise EngineError(f"vLLM gave {len(logprobs)} logprobs for {len(token_ids)} tokens")
        kept_ids = None if output.sampling_mask is None else output.sampling_mask.token_ids
        return cls(
            token_ids=token_ids,
            logprobs=logprobs,
            spans=_spans(output, adapter_version) if token_ids else [],
            reason=finish_reason(output.finish_reason),
            stop_text=output.stop_reason if isinstance(output.stop_reason, str) else "",
            kept_ids=_survivors(output.logprobs) if has_all_logprobs and token_ids else kept_ids,
            experts=output.routed_experts,
        )


@dataclass(slots=True)
class Draft:
    """A completion that is being made of segments.

    num_prompt_tokens: before it. routing: number of experts, and layers with a router, where it keeps
    the experts of every token that was read.
    """

    num_prompt_tokens: int = 0
    routing: tuple[int, tuple[int, ...]] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    experts: list[ExpertIds] = field(default_factory=list)

    @classmethod
    def behind(
        cls,
        begun: UnfinishedCompletion | None,
        *,
        num_prompt_tokens: int,
        routing: tuple[int, tuple[int, ...]] | None,
    ) -> Draft:
        """One that goes on behind what another engine had."""
        if begun is None:
            return cls(num_prompt_tokens=num_prompt_tokens, routing=routing)
        mask = begun.sampling_mask
        kept = np.split(mask.kept_ids, np.cumsum(mask.num_kept, dtype=np.int64)[:-1]) if mask else []
        return cls(
            num_prompt_tokens=num_prompt_tokens,
            routing=routing,
            token_ids=begun.token_ids.tolist(),
            logprobs=begun.generator_logprobs.tolist(),
            spans=[(span.weight_version, span.first_token) for span in begun.spans],
            kept_ids=[ids.tolist() for ids in kept],
        )

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    @property
    def num_routed(self) -> int:
        """Tokens of prompt and completion whose experts are known; the next segment begins with those after."""
        return sum(len(experts) for experts in self.experts)

    def with_(self, segment: Segment | None) -> Draft:
        """What it would be with another segment behind it; it stays as it is."""
        copied = Draft(
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=[*self.token_ids],
            logprobs=[*self.logprobs],
            spans=[*self.spans],
            kept_ids=[*self.kept_ids],
        )
        if segment is not None:
            copied.append(segment)
        return copied

    def append(self, segment: Segment) -> None:
        """Put the next segment behind what there is."""
        for version, first in segment.spans:
            if not self.spans or self.spans[-1][0] != version:
                self.spans.append((version, self.num_tokens + first))
        self.token_ids += segment.token_ids
        self.logprobs += segment.logprobs
        self.kept_ids += segment.kept_ids or []
        if self.routing is not None and segment.experts is not None:
            self.experts.append(segment.experts)

    def completion(self, reason: FinishReason, text: str) -> Completion:
        """All segments as one."""
        drawn = self.unfinished()
        return Completion(
            token_ids=drawn.token_ids,
            generator_logprobs=drawn.generator_logprobs,
            loss_mask=np.ones(self.num_tokens, dtype=np.uint8),
            spans=drawn.spans,
            finish_reason=reason,
            text=text,
            sampling_mask=drawn.sampling_mask,
            routed_experts=self._routed_experts(*self.routing) if self.routing else None,
        )

    def unfinished(self) -> UnfinishedCompletion:
        """All segments so far, of which there is at least one. Raises NonFiniteError."""
        if not all(np.isfinite(self.logprobs)):
            raise NonFiniteError("the weights gave logits that are not finite")
        return UnfinishedCompletion(
            token_ids=np.array(self.token_ids, dtype=np.uint32),
            generator_logprobs=np.array(self.logprobs, dtype=np.float32),
            spans=tuple(VersionSpan(weight_version=version, first_token=first) for version, first in self.spans),
            sampling_mask=self._mask() if len(self.kept_ids) == self.num_tokens else None,
        )

    def _routed_experts(self, num_experts: int, layers: tuple[int, ...]) -> RoutedExperts:
        num_read = self.num_prompt_tokens + self.num_tokens - 1
        if self.num_routed != num_read:
            raise EngineError(f"vLLM gave the experts of {self.num_routed} tokens, {num_read} were read")
        experts = np.concatenate(self.experts)[:, list(layers)]
        return RoutedExperts(ids=experts.astype(expert_dtype(num_experts)), num_experts=num_experts)

    def _mask(self) -> SamplingMask:
        return SamplingMask(
            kept_ids=np.array([token for kept in self.kept_ids for token in kept], dtype=np.uint32),
            num_kept=np.array([len(kept) for kept in self.kept_ids], dtype=np.uint32),
        )


def drafts_of(
    prompt: PromptGroup, partial: PartialGroup | None, limit: int, routing: tuple[int, tuple[int, ...]] | None = None
) -> dict[int, Draft]:
    """A draft for each completion that is not finished. limit: tokens that one may have. routing: as in `Draft`."""
    finished, begun = (partial.finished, partial.unfinished) if partial else ({}, {})
    begun = {index: item for index, item in begun.items() if len(item) < limit}
    missing = [index for index in range(prompt.sampling.group_size) if index not in finished]
    num_prompt_tokens = len(prompt.prompt_token_ids)
    return {
        index: Draft.behind(begun.get(index), num_prompt_tokens=num_prompt_tokens, routing=routing) for index in missing
    }


def all_of(
    prompt: PromptGroup, partial: PartialGroup | None, drafts: Mapping[int, Draft], ended: Iterable[object]
) -> tuple[Completion, ...]:
    """The completions of a group. ended: what became of each draft, which is raised where it is an error.

    Raises Interrupted where some have no end.
    """
    ended = list(ended)
    for completion in ended:
        if isinstance(completion, Exception):
            raise completion
    left = left_of(prompt, partial, drafts, ended)
    if len(left.finished) < prompt.sampling.group_size:
        raise Interrupted(left)
    return tuple(left.finished[index] for index in range(len(left.finished)))


def left_of(
    prompt: PromptGroup, partial: PartialGroup | None, drafts: Mapping[int, Draft], ended: Iterable[object]
) -> PartialGroup:
    """What there is of a group. ended: the completion that each draft has become, or anything else."""
    finished = dict(partial.finished) if partial else {}
    finished |= {index: item for index, item in zip(drafts, ended, strict=True) if isinstance(item, Completion)}
    # Which experts read a beginning is not carried along, so where that matters it is made anew.
    is_carried = not prompt.sampling.keep_routed_experts
    left = {
        index: draft for index, draft in drafts.items() if is_carried and draft.num_tokens and index not in finished
    }
    unfinished = {index: draft.unfinished() for index, draft in left.items()}
    return PartialGroup(prompt=prompt, finished=finished, unfinished=unfinished)


class TokenCounter:
    """Counts the tokens of all steps. logger: a stat logger factory, as vLLM wants it."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """A logger for one engine core that counts here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counter = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                if iteration_stats is not None:
                    counter.num_tokens += iteration_stats.num_generation_tokens

            def log_engine_initialized(self) -> None:
                pass

        return Logger(vllm_config, engine_index)


def finish_reason(name: str | None) -> FinishReason | None:
    """From vLLM's name; None where a sequence was broken off. Raises EngineError: another name."""
    if name not in _REASONS:
        raise EngineError(f"vLLM ended a sequence with {name!r}")
    return _REASONS[name]


def _logprobs(output: Any) -> list[float]:
    """Of the token that was drawn, at each position: it is the first that vLLM names."""
    found = output.logprobs
    return [] if found is None else [found.logprobs[start] for start in found.start_indices]


def _survivors(found: Any) -> list[list[int]]:
    """Tokens that could be drawn, at each position: those that were cut have no probability."""
    rows = zip(found.start_indices, found.end_indices, strict=True)
    return [
        sorted(
            {
                token
                for token, value in zip(found.token_ids[start:end], found.logprobs[start:end], strict=True)
                if value > -math.inf
            }
        )
        for start, end in rows
    ]


def _spans(output: Any, adapter_version: int | None) -> list[tuple[int, int]]:
    if adapter_version is not None:
        return [(adapter_version, 0)]
    if not output.weight_versions:
        raise EngineError("vLLM does not say which weights drew a sequence")
    return [(int(span.version), span.start) for span in output.weight_versions]
