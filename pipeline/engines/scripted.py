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
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.config import GenerationSettings
from pipeline.errors import EngineError, WeightError
from pipeline.messages import Completion, FinishReason, PromptGroup, VersionSpan
from pipeline.weights import WeightState

_WORD = (1 << 64) - 1
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One completion being "decoded". started_at: the loop's clock. spans: (version, first token)."""

    group: _Group
    length: int
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
    sequences: list[_Sequence] = field(default_factory=list)
    num_done: int = 0


class ScriptedEngine:
    """A `GenerationEngine`. seed: mixed into every completion beside the prompt's own.

    max_context: tokens of a prompt and its completion; 0 for no limit.
    """

    def __init__(self, generation: GenerationSettings, *, seed: int, max_context: int = 0) -> None:
        self._generation, self._seed, self._max_context = generation, seed, max_context
        self._scripted = generation.scripted
        self._version: int | None = None
        self._num_tokens = 0
        self._is_running = False
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
        if not self._running:
            return self._num_tokens
        now = asyncio.get_running_loop().time()
        return self._num_tokens + sum(self._tokens_at(sequence, now) for sequence in self._running)

    async def start(self) -> None:
        """Nothing to load."""
        self._is_running = True

    async def generate(self, prompt: PromptGroup) -> tuple[Completion, ...]:
        """`prompt.sampling.group_size` completions after the time they take. Raises EngineError."""
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
        group = self._plan(prompt)
        if not self._scripted.realtime:
            version = self._version
            await asyncio.sleep(0)
            self._num_tokens += int(group.lengths.sum())
            return self._completions(
                group, [(VersionSpan(weight_version=version, first_token=0),)] * len(group.lengths)
            )
        group.sequences += [_Sequence(group=group, length=int(length)) for length in group.lengths]
        self._groups.add(group)
        self._waiting.extend(group.sequences)
        self._fill_slots()
        try:
            await group.done
        finally:
            self._forget(group)
        return self._completions(group, [tuple(sequence.spans) for sequence in group.sequences])

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

    def _plan(self, prompt: PromptGroup) -> _Group:
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
        return _Group(
            prompt=prompt,
            done=asyncio.get_running_loop().create_future(),
            lengths=lengths,
            reasons=tuple(FinishReason.LENGTH if cut else FinishReason.STOP for cut in is_cut.tolist()),
            generator=generator,
        )

    def _completions(self, group: _Group, spans: list[tuple[VersionSpan, ...]]) -> tuple[Completion, ...]:
        total = int(group.lengths.sum())
        token_ids = group.generator.integers(0, self._scripted.vocab_size, size=total, dtype=np.uint32)
        logprobs = -group.generator.standard_exponential(total, dtype=np.float32)
        loss_mask = np.ones(total, dtype=np.uint8)
        text = _LETTERS[token_ids % len(_LETTERS)].tobytes().decode("ascii")
        ends = np.cumsum(group.lengths).tolist()
        parts = [slice(start, end) for start, end in pairwise([0, *ends])]
        return tuple(
            Completion(
                token_ids=token_ids[part],
                generator_logprobs=logprobs[part],
                loss_mask=loss_mask[part],
                spans=versions,
                finish_reason=reason,
                text=text[part],
            )
            for part, versions, reason in zip(parts, spans, group.reasons, strict=True)
        )

    def _fill_slots(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and len(self._running) < self.max_num_seqs:
            sequence = self._waiting.popleft()
            assert self._version is not None
            sequence.started_at = now
            sequence.spans.append(VersionSpan(weight_version=self._version, first_token=0))
            sequence.timer = loop.call_at(now + sequence.length / self._scripted.tokens_per_s, self._finish, sequence)
            self._running.add(sequence)

    def _finish(self, sequence: _Sequence) -> None:
        self._running.discard(sequence)
        self._num_tokens += sequence.length
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
                self._num_tokens += self._tokens_at(sequence, now)
                self._running.discard(sequence)
                assert sequence.timer is not None
                sequence.timer.cancel()
        self._waiting = deque(sequence for sequence in self._waiting if sequence.group is not group)
        self._fill_slots()

    def _tokens_at(self, sequence: _Sequence, now: float) -> int:
        return min(sequence.length, int((now - sequence.started_at) * self._scripted.tokens_per_s))


def _start_span(sequence: _Sequence, weight_version: int, first_token: int) -> None:
    """Tokens from `first_token` on are the new version's; a span without tokens gives way."""
    if first_token >= sequence.length:
        return
    if sequence.spans[-1].first_token == first_token:
        sequence.spans.pop()
    sequence.spans.append(VersionSpan(weight_version=weight_version, first_token=first_token))
