"""A teacher in this process: a causal language model of transformers.

In: rollouts. Out: logprobs of their tokens as they were generated, and of the likeliest ids, at their
temperature and over the ids that could be drawn. One group is in work at a time, in a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.batching import kept_tokens
from pipeline.config import Config, LoraSettings, ModelSettings, TeacherSettings
from pipeline.errors import MessageError
from pipeline.messages import Completion, RolloutGroup, TokenIds, TopLogprobs
from pipeline.models.files import naming
from pipeline.models.loading import (
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from pipeline.packing import padded_batches
from pipeline.policy.logprobs import Targets, chunked_logprobs
from pipeline.policy.output_head import OutputHead, find_output_head
from pipeline.policy.top_logprobs import chunked_top_logprobs
from pipeline.teachers import Lesson
from pipeline.teachers.vocabulary import check_size, check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LocalTeacher:
    """A `Teacher` on a device of this machine."""

    def __init__(self, config: Config, settings: TeacherSettings, setting: str) -> None:
        self._policy = config.model
        self._settings = settings
        self._setting = setting
        self._chunk_tokens = config.trainer.logprob_chunk_tokens
        self._context = self._num_ids = 0
        self._head: OutputHead | None = None
        self._device = torch.device("cpu")
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Raises ModelError, ConfigError."""
        await asyncio.to_thread(self._load)

    async def away(self) -> str:
        """It is here."""
        return ""

    async def lessons(self, rollout: RolloutGroup) -> list[Lesson]:
        """See `Teacher`."""
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._lessons, rollout)

    async def close(self) -> None:
        """Forget the model."""
        self._head = None

    def _load(self) -> None:
        settings = self._settings
        model = ModelSettings(
            path=settings.model, attention=self._policy.attention, trust_remote_code=settings.trust_remote_code
        )
        policy = load_tokenizer(self._policy)
        with naming(f"{self._setting}.model"):
            own = load_tokenizer(model)
        check_vocabulary(policy, own, setting=self._setting, model=settings.model)
        with naming(f"{self._setting}.model"):
            self._context = context_length(model, load_config(model))
            self._device = resolve_device(settings.device, setting=f"{self._setting}.device")
            dtype = resolve_dtype(settings.dtype, self._device)
            loaded = load_model(model, LoraSettings(), device=self._device, dtype=dtype, seed=0, trainable=False)
        teacher = cast("PreTrainedModel", loaded)
        embeddings: Any = teacher.get_input_embeddings()
        layer: Any = teacher.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._num_ids = int(embeddings.weight.shape[0])
        if layer is not None:
            needed = max(policy.get_vocab().values()) + 1
            check_size(needed, int(layer.weight.shape[0]), setting=self._setting, model=settings.model)
        self._head = find_output_head(teacher)

    @torch.inference_mode()
    def _lessons(self, rollout: RolloutGroup) -> list[Lesson]:
        self._check(rollout)
        found: dict[int, Lesson] = {}
        prompt = rollout.prompt.prompt_token_ids
        for rows in padded_batches(
            [len(prompt) + len(item) for item in rollout.completions], self._settings.batch_tokens
        ):
            chosen = [rollout.completions[row] for row in rows]
            lessons = self._of_batch(prompt, chosen, rollout.prompt.sampling.temperature)
            found |= dict(zip(rows, lessons, strict=True))
        return [found[row] for row in range(len(rollout.completions))]

    def _check(self, rollout: RolloutGroup) -> None:
        prompt = rollout.prompt
        if not len(prompt.prompt_token_ids) or prompt.sampling.temperature <= 0:
            raise MessageError("an empty prompt, or greedy completions, have no probabilities to learn")
        highest = max(int(ids.max(initial=0)) for ids in (prompt.prompt_token_ids, *_ids_of(rollout)))
        if highest >= self._num_ids:
            raise MessageError(
                f"token {highest} of the group: {self._setting}.model = {self._settings.model!r} has embeddings for "
                f"{self._num_ids}"
            )
        longest = len(prompt.prompt_token_ids) + max(map(len, rollout.completions), default=0)
        if longest > self._context:
            raise MessageError(
                f"prompt and completion have {longest} tokens, the context of {self._setting}.model = "
                f"{self._settings.model!r} is {self._context}"
            )

    def _of_batch(self, prompt: TokenIds, completions: Sequence[Completion], temperature: float) -> list[Lesson]:
        assert self._head is not None, "started"
        lengths = [len(item) for item in completions]
        width = len(prompt) + max(lengths)
        ids = np.zeros((len(completions), width), dtype=np.int64)  # [B, L]
        attention = np.zeros_like(ids)
        for row, item in enumerate(completions):
            length = len(prompt) + len(item)
            ids[row, :length] = np.concatenate([prompt, item.token_ids])
            attention[row, :length] = 1
        first = len(prompt) - 1  # its state predicts the first token of the completion
        places = np.concatenate([row * width + first + np.arange(length) for row, length in enumerate(lengths)])  # [M]
        states = self._head.states(self._tensor(ids), self._tensor(attention), None).flatten(0, 1)[self._tensor(places)]
        kept = kept_tokens([(item, np.ones(len(item), dtype=bool)) for item in completions])
        targets = Targets(
            token_ids=self._tensor(np.concatenate([item.token_ids for item in completions]).astype(np.int64)),
            temperatures=torch.full((len(places),), temperature, device=self._device),
            kept=kept.to(self._device) if kept is not None else None,
        )
        return self._asked(states, targets, lengths)

    def _asked(self, states: Tensor, targets: Targets, lengths: Sequence[int]) -> list[Lesson]:
        """states: [M, H], of all tokens of completions of these lengths."""
        assert self._head is not None, "started"
        project, chunk_tokens, top_k = self._head.project, self._chunk_tokens, self._settings.top_k
        if not top_k:
            logprobs, _ = chunked_logprobs(states, targets, project, chunk_tokens=chunk_tokens)
            return [Lesson(logprobs=part) for part in _parts(logprobs.float(), lengths)]
        logprobs, ids, top = chunked_top_logprobs(states, targets, project, chunk_tokens=chunk_tokens, top_k=top_k)
        parts = zip(*(_parts(values, lengths) for values in (logprobs.float(), ids.int(), top.float())), strict=True)
        return [
            Lesson(logprobs=values, top=(TopLogprobs(token_ids=numbers.astype(np.uint32), logprobs=likeliest),))
            for values, numbers, likeliest in parts
        ]

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _parts(values: Tensor, lengths: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Of each completion."""
    return [np.ascontiguousarray(part) for part in np.split(values.cpu().numpy(), np.cumsum(lengths)[:-1])]


def _ids_of(rollout: RolloutGroup) -> list[TokenIds]:
    return [item.token_ids for item in rollout.completions]
