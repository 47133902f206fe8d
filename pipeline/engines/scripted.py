"""An engine without a model: seeded tokens at a settable speed, for tests, benchmarks and first steps.

In: prompt groups, and weights of which only the version counts. Out: completions that depend on
nothing but seeds, ordinal and index. It holds slots, lets weights land in mid-sequence and answers
as late as a real engine would, all by timers of the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.config import GenerationSettings
from pipeline.engines import Interrupted
from pipeline.errors import EngineError, WeightError
from pipeline.messages import (
    Completion,
    FinishReason,
    Floats,
    PartialGroup,
    PromptGroup,
    TokenIds,
    UnfinishedCompletion,
    VersionSpan,
)
from pipeline.weights import WeightState

_WORD = (1 << 64) - 1
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One completion being "decoded". begun: tokens from elsewhere. num_tokens: while it does not run."""

    group: _Group
    index: int
    length: int
    begun: int
    num_tokens: int
    started_at: float = 0.0
    spans: list[VersionSpan] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    prompt: PromptGroup
    done: asyncio.Future[None]
    lengths: npt.NDArray[np.int64]
    reasons: tuple[FinishReason, ...]
    generator: np.random.Generator
    partial: PartialGroup | None
    sequences: list[_Sequence] = field(default_factory=list)
    num_done: int = 0
    drawn: list[tuple[TokenIds, Floats]] | None = None

    def begun(self, index: int) -> UnfinishedCompletion | None:
        """What another engine had of a completion."""
        return self.partial.unfinished.get(index) if self.partial else None

    def finished(self, index: int) -> Completion | None:
        """A completion that another engine had finished."""
        return self.partial.finished.get(index) if self.partial else None


class ScriptedEngine:
    """A `GenerationEngine`. seed: mixed into every completion beside the prompt's own.

    max_context: tokens of a prompt and its completion; 0 for no limit.
    """

    def __init__(self, generation: GenerationSettings, *, seed: int, max_context: int = 0) -> None:
        self._generation, self._seed, self._max_context = generation, seed, max_context
        self._scripted = generation.scripted
        self._version: int | None = None
        self._num_tokens = 0
        self._is_running = self._is_interrupted = False
        self._groups: set[_Group] = set()
        self._waiting: deque[_Sequence] = deque()
        self._running: set[_Sequence] = set()

    @property
    def weight_version(self) -> int | None:
        """Version that is being served; None until the first `apply_weights`."""
        return self._version

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once."""
        return self._generation.max_num_seqs

    @property
    def num_unfinished_seqs(self) -> int:
        """Sequences accepted and not yet ended."""
        return len(self._running) + len(self._waiting)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start, those of running sequences included as time passes."""
        now = asyncio.get_running_loop().time() if self._running else 0.0
        return self._num_tokens + sum(self._tokens_at(sequence, now) - sequence.begun for sequence in self._running)

    async def start(self) -> None:
        """Nothing to load."""
        self._is_running = True

    async def generate(self, prompt: PromptGroup, partial: PartialGroup | None = None) -> tuple[Completion, ...]:
        """`prompt.sampling.group_size` completions after the time they take. Raises EngineError or Interrupted."""
        if not self._is_running:
            raise EngineError("the engine is not running")
        if self._version is None:
            raise EngineError("no verified weights are being served yet; apply_weights comes first")
        num_prompt_tokens = len(prompt.prompt_token_ids)
        if 0 < self._max_context <= num_prompt_tokens:
            raise EngineError(
                f"group {prompt.group_id}: a prompt of {num_prompt_tokens} tokens leaves nothing to generate "
                f"in a context of {self._max_context}"
            )
        group = self._plan(prompt, partial)
        group.sequences += [_sequence(group, index) for index in range(len(group.lengths))]
        if self._is_interrupted:
            raise Interrupted(self._so_far(group))
        if not self._scripted.realtime:
            version = self._version
            await asyncio.sleep(0)
            for sequence in group.sequences:
                self._num_tokens += sequence.length - sequence.begun
                _start_span(sequence, version, sequence.begun)
            return self._completions(group)
        self._groups.add(group)
        self._waiting.extend(sequence for sequence in group.sequences if sequence.begun < sequence.length)
        group.num_done = sum(sequence.begun == sequence.length for sequence in group.sequences)
        if group.num_done == len(group.lengths):
            group.done.set_result(None)
        self._fill_slots()
        try:
            await group.done
        finally:
            self._forget(group)
        return self._completions(group)

    async def interrupt(self) -> None:
        """End what is in flight with what there is of it."""
        self._is_interrupted = True
        for group in list(self._groups):
            if not group.done.done():
                group.done.set_exception(Interrupted(self._so_far(group)))
            self._forget(group)

    async def so_far(self) -> list[PartialGroup]:
        """What there is of the groups in flight."""
        return [self._so_far(group) for group in self._groups]

    async def apply_weights(self, state: WeightState) -> float:
        """From now on tokens are this version's. Raises WeightError for an older version."""
        if self._version is not None and state.weight_version < self._version:
            raise WeightError(f"version {state.weight_version} is older than version {self._version} being served")
        if state.weight_version == self._version:
            return 0.0
        self._version = state.weight_version
        now = asyncio.get_running_loop().time()
        for sequence in self._running:
            _start_span(sequence, state.weight_version, self._tokens_at(sequence, now))
        return 0.0

    async def close(self) -> None:
        """What is in flight ends with EngineError."""
        self._is_running = False
        for group in list(self._groups):
            if not group.done.done():
                group.done.set_exception(EngineError("the engine was closed"))
            self._forget(group)

    def _plan(self, prompt: PromptGroup, partial: PartialGroup | None) -> _Group:
        """Everything of a group that chance decides, from (seeds, ordinal)."""
        settings, sampling = self._scripted, prompt.sampling
        philox = np.random.Philox(
            key=[self._seed & _WORD, prompt.ordinal & _WORD], counter=[0, 0, 0, sampling.seed & _WORD]
        )
        generator = np.random.Generator(philox)
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        mu = math.log(settings.length_mean) - settings.length_sigma**2 / 2
        wanted = np.exp(mu + settings.length_sigma * generator.standard_normal(sampling.group_size))
        lengths = np.clip(np.rint(wanted).astype(np.int64), 1, sampling.max_tokens)
        is_cut = np.rint(wanted) > sampling.max_tokens
        if partial:
            for index, begun in partial.unfinished.items():
                lengths[index] = max(lengths[index], len(begun) + 1)  # an engine with other settings began it
            for index, finished in partial.finished.items():
                lengths[index] = len(finished)
        return _Group(
            prompt=prompt,
            done=asyncio.get_running_loop().create_future(),
            lengths=lengths,
            reasons=tuple(FinishReason.LENGTH if cut else FinishReason.STOP for cut in is_cut.tolist()),
            generator=generator,
            partial=partial,
        )

    def _tokens(self, group: _Group) -> list[tuple[TokenIds, Floats]]:
        """Token ids and logprobs of every completion, whole; what was begun elsewhere stays as it is."""
        if group.drawn is not None:
            return group.drawn
        total = int(group.lengths.sum())
        token_ids = group.generator.integers(0, self._scripted.vocab_size, size=total, dtype=np.uint32)
        logprobs = -group.generator.standard_exponential(total, dtype=np.float32)
        ends = np.cumsum(group.lengths)
        for sequence, start in zip(group.sequences, ends - group.lengths, strict=True):
            if (begun := group.begun(sequence.index)) is not None:
                token_ids[start : start + len(begun)] = begun.token_ids
                logprobs[start : start + len(begun)] = begun.generator_logprobs
        group.drawn = list(zip(np.split(token_ids, ends[:-1]), np.split(logprobs, ends[:-1]), strict=True))
        return group.drawn

    def _completions(self, group: _Group) -> tuple[Completion, ...]:
        return tuple(
            group.finished(sequence.index)
            or Completion(
                token_ids=token_ids,
                generator_logprobs=logprobs,
                loss_mask=np.ones(len(token_ids), dtype=np.uint8),
                spans=tuple(sequence.spans),
                finish_reason=group.reasons[sequence.index],
                text=_LETTERS[token_ids % len(_LETTERS)].tobytes().decode("ascii"),
            )
            for sequence, (token_ids, logprobs) in zip(group.sequences, self._tokens(group), strict=True)
        )

    def _so_far(self, group: _Group) -> PartialGroup:
        now = asyncio.get_running_loop().time()
        finished: dict[int, Completion] = {}
        unfinished: dict[int, UnfinishedCompletion] = {}
        for sequence, completion in zip(group.sequences, self._completions(group), strict=True):
            num_tokens = self._tokens_at(sequence, now) if sequence in self._running else sequence.num_tokens
            if num_tokens == sequence.length:
                finished[sequence.index] = completion
            elif num_tokens:
                unfinished[sequence.index] = UnfinishedCompletion(
                    token_ids=completion.token_ids[:num_tokens],
                    generator_logprobs=completion.generator_logprobs[:num_tokens],
                    spans=tuple(span for span in sequence.spans if span.first_token < num_tokens),
                )
        return PartialGroup(prompt=group.prompt, finished=finished, unfinished=unfinished)

    def _fill_slots(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and len(self._running) < self.max_num_seqs:
            sequence = self._waiting.popleft()
            assert self._version is not None
            sequence.started_at = now
            _start_span(sequence, self._version, sequence.begun)
            seconds = (sequence.length - sequence.begun) / self._scripted.tokens_per_s
            sequence.timer = loop.call_at(now + seconds, self._finish, sequence)
            self._running.add(sequence)

    def _finish(self, sequence: _Sequence) -> None:
        self._running.discard(sequence)
        self._num_tokens += sequence.length - sequence.begun
        sequence.num_tokens = sequence.length
        group = sequence.group
        group.num_done += 1
        if group.num_done == len(group.lengths) and not group.done.done():
            group.done.set_result(None)
        self._fill_slots()

    def _forget(self, group: _Group) -> None:
        """Free what a group that ended, failed or was cancelled still holds."""
        self._groups.discard(group)
        if group.num_done == len(group.lengths):
            return
        now = asyncio.get_running_loop().time()
        for sequence in group.sequences:
            if sequence in self._running:
                self._num_tokens += self._tokens_at(sequence, now) - sequence.begun
                self._running.discard(sequence)
                assert sequence.timer is not None
                sequence.timer.cancel()
        self._waiting = deque(sequence for sequence in self._waiting if sequence.group is not group)
        self._fill_slots()

    def _tokens_at(self, sequence: _Sequence, now: float) -> int:
        drawn = int((now - sequence.started_at) * self._scripted.tokens_per_s)
        return min(sequence.length, sequence.begun + drawn)


def _sequence(group: _Group, index: int) -> _Sequence:
    begun, length = group.finished(index) or group.begun(index), int(group.lengths[index])
    num_tokens, spans = (len(begun), list(begun.spans)) if begun else (0, [])
    return _Sequence(group=group, index=index, length=length, begun=num_tokens, num_tokens=num_tokens, spans=spans)


def _start_span(sequence: _Sequence, weight_version: int, first_token: int) -> None:
    """Tokens from `first_token` on are the new version's; a span without tokens gives way."""
    if first_token >= sequence.length:
        return
    if sequence.spans and sequence.spans[-1].first_token == first_token:
        sequence.spans.pop()
    if sequence.spans and sequence.spans[-1].weight_version == weight_version:
        return
    sequence.spans.append(VersionSpan(weight_version=weight_version, first_token=first_token))
