"""The decode loop, one step at a time: sequences join and leave between steps.

In: prompt groups, and new weights between two steps. Out: finished groups, each token with the
logprob it was drawn at and the version that drew it. Knows nothing of threads or event loops.

transformers' own continuous batching is not used: it has one seed, one temperature and one set of
logits processors for all requests, so neither per-completion seeds nor mixed batches are possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from pipeline.engines import Interrupted
from pipeline.engines.attention import use_row_attention
from pipeline.engines.joining import Joining, next_to_join, padded, prefill_batches
from pipeline.engines.kv_cache import Prefix, RowCache
from pipeline.engines.rows import Bools, GroupTask, Rows
from pipeline.engines.sampling import Draw, RowSampling, draw
from pipeline.engines.stop_texts import before_stop, ends_in_stop_text
from pipeline.errors import EngineError, WeightError
from pipeline.messages import Completion, FinishReason, PartialGroup, UnfinishedCompletion
from pipeline.models.routing import RoutingRecorder
from pipeline.models.weights import Staged, apply_staged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Outcome: TypeAlias = tuple[GroupTask, tuple[Completion, ...] | EngineError | Interrupted]


class Decoder:
    """A model, its cache and the sequences in flight. One thread owns it.

    model: called as Hugging Face causal language models are. end_ids: tokens that end a completion.
    recorder: of the model's routers, where prompts may ask for the experts that they choose.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Sequence[int],
        max_num_seqs: int,
        recorder: RoutingRecorder | None = None,
    ) -> None:
        self.weight_version: int | None = None
        self.num_tokens_generated = 0
        self._model = model.get_base_model() if hasattr(model, "peft_config") else model
        self._tokenizer: Any = tokenizer
        use_row_attention(self._model)
        self._device = next(model.parameters()).device
        config = self._model.config.get_text_config(decoder=True)
        self._is_additive = config._attn_implementation == "eager"
        self._vocabulary_size = int(config.vocab_size)
        self._is_end = np.zeros(self._vocabulary_size, dtype=bool)
        self._is_end[[token for token in end_ids if token < self._vocabulary_size]] = True
        self._max_num_seqs = max_num_seqs
        self._recorder = recorder
        self._rows = Rows(max_num_seqs, num_experts=recorder.num_experts if recorder else 0)
        self._num_layers = int(config.num_hidden_layers)
        self._cache = RowCache(self._num_layers)
        self._sampling: RowSampling | None = None
        self._waiting: deque[GroupTask] = deque()
        self._outcomes: list[Outcome] = []
        self._is_asleep = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self._is_asleep and bool(self._rows.num_rows or self._waiting)

    def submit(self, task: GroupTask) -> None:
        """Queue a group; its completions join from the next step on, in the order of submission."""
        self._waiting.append(task)

    def cancel(self, task: GroupTask) -> None:
        """Forget a group and free its rows."""
        self._discard([task])

    def fail_all(self, error: EngineError) -> None:
        """Every group that is waiting or in flight ends with `error`."""
        running = [self._rows.member(row)[0] for row in range(self._rows.num_rows)]
        self._fail(list(dict.fromkeys([*running, *self._waiting])), error)

    def interrupt(self) -> None:
        """Every group that is waiting or in flight ends with what there is of it."""
        begun = self._begun()
        self._discard(list(begun))
        self._outcomes += [(task, Interrupted(task.left(drawn))) for task, drawn in begun.items()]

    def so_far(self) -> list[PartialGroup]:
        """What there is of every group that is waiting or in flight."""
        return [task.left(drawn) for task, drawn in self._begun().items()]

    def _begun(self) -> dict[GroupTask, dict[int, UnfinishedCompletion]]:
        begun: dict[GroupTask, dict[int, UnfinishedCompletion]] = {task: {} for task in self._waiting}
        for row in range(self._rows.num_rows):
            task, index = self._rows.member(row)
            begun.setdefault(task, {})[index] = self._rows.unfinished(row)
        return begun

    def take_outcomes(self) -> list[Outcome]:
        """Groups that ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def sleep(self) -> None:
        """Leave the device: no step is made until `wake_up`."""
        self._is_asleep = True
        self._move(torch.device("cpu"))

    def wake_up(self) -> None:
        """Take the device again."""
        self._move(self._device)
        self._is_asleep = False

    @torch.inference_mode()
    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        self._cache.to(device)
        self._sampling = None
        for task in self._waiting:
            task.prefix = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def replace_weights(self, staged: Staged, weight_version: int) -> None:
        """Between two steps: rows keep their keys and values, and their next token is the new version's.

        Prompts whose members have not all joined are read anew, so that versions never share a prefix.
        Raises WeightError: an older version, or a copy that broke off (then nothing is served).
        """
        if self.weight_version is not None and weight_version < self.weight_version:
            raise WeightError(f"version {weight_version} is older than version {self.weight_version} being served")
        try:
            apply_staged(staged)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            self.weight_version = None
            self.fail_all(EngineError(f"weights {weight_version} were applied in part: {error}"))
            raise WeightError(f"weights {weight_version} could not be copied: {error}") from error
        for task in self._waiting:
            task.prefix = None
        self.weight_version = weight_version

    @torch.inference_mode()
    def step(self) -> None:
        """Let waiting sequences join, then draw one token for every row. Whatever fails ends in an outcome."""
        if self._is_asleep:
            return
        try:
            self._admit()
            if self._rows.num_rows:
                self._advance()
        except Exception as error:  # noqa: BLE001  whatever the model raises ends these groups, not the process
            self.fail_all(EngineError(f"the model failed: {type(error).__name__}: {error}"))
            self._cache = RowCache(self._num_layers)

    def _advance(self) -> None:
        drawn = self._draw()
        token_ids, logprobs = drawn.token_ids.cpu().numpy(), drawn.logprobs.cpu().numpy()
        assert self.weight_version is not None
        self._rows.record(token_ids, logprobs, self.weight_version)
        if drawn.kept is not None and self._rows.active["keeps_mask"].any():
            self._rows.keep_survivors(drawn.kept.cpu().numpy())
        self.num_tokens_generated += len(token_ids)
        self._fail_nonfinite(~np.isfinite(logprobs))
        self._finish()

    def _draw(self) -> Draw:
        rows = self._rows
        lengths = self._tensor(rows.active["length"])
        num_columns = rows.num_columns
        self._cache.begin_step(lengths, num_columns)
        is_seen = torch.arange(num_columns, device=self._device) <= lengths[:, None]  # [n, columns]
        with self._recording(any_row=bool(rows.active["keeps_routing"].any())) as chosen:
            output = self._model(
                input_ids=self._tensor(rows.active["next_id"])[:, None],
                attention_mask=self._mask(is_seen[:, None, None, :]),
                position_ids=lengths[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )
        if chosen and self._recorder:
            rows.keep_routed(self._recorder.ids(chosen))
        if self._sampling is None:
            self._sampling = rows.sampling(self._device)
        return draw(output.logits[:, -1], self._sampling, self._tensor(rows.uniform()))

    def _mask(self, is_seen: torch.Tensor) -> torch.Tensor:
        if not self._is_additive:
            return is_seen
        dtype = self._model.dtype
        return torch.zeros_like(is_seen, dtype=dtype).masked_fill(~is_seen, torch.finfo(dtype).min)

    def _admit(self) -> None:
        failed: set[GroupTask] = set()
        for together in prefill_batches(next_to_join(self._waiting, self._max_num_seqs - self._rows.num_rows)):
            batch = [join for join in together if join.task not in failed]
            if not batch:
                continue
            try:
                self._join(batch, self._prefill(batch))
            except Exception as error:  # noqa: BLE001  whatever the model raises ends these groups only
                reason = f"the prompt could not be read: {type(error).__name__}: {error}"
                tasks = list(dict.fromkeys(join.task for join in batch))
                failed.update(tasks)
                self._fail(tasks, EngineError(reason))
        while self._waiting and not self._waiting[0].waiting:
            self._waiting.popleft().prefix = None

    def _prefill(self, batch: Sequence[Joining]) -> Prefix | None:
        """Keys and values of each text without its last token, which the next step reads in every member's row.

        Texts are padded on the right: no real token ever looks at the padding, and what it leaves in
        the cache lies beyond a row's length until a token of the row overwrites it.
        """
        if len(batch) == 1 and batch[0].is_read:
            return batch[0].task.prefix
        texts = [join.token_ids[:-1] for join in batch]
        ids = padded(texts)
        if not ids.shape[1]:
            return None
        cache = DynamicCache()
        with self._recording(any_row=any(join.task.prompt.sampling.keep_routed_experts for join in batch)) as chosen:
            self._model.base_model(input_ids=self._tensor(ids), past_key_values=cache, use_cache=True)
        if chosen and self._recorder:
            experts = self._recorder.ids(chosen).reshape(*ids.shape, len(chosen), -1)
            for join, text, routed in zip(batch, texts, experts, strict=True):
                join.task.routed = routed[: len(text)]
        layers: list[Any] = cache.layers
        return [(layer.keys, layer.values) for layer in layers]

    def _recording(self, *, any_row: bool) -> AbstractContextManager[list[torch.Tensor]]:
        return self._recorder.recording() if self._recorder and any_row else nullcontext([])

    def _join(self, batch: Sequence[Joining], prefix: Prefix | None) -> None:
        source = [index for index, join in enumerate(batch) for _ in join.members]
        if prefix is not None:
            self._cache.fill(self._rows.num_rows, prefix, torch.tensor(source, device=self._device))
        for join in batch:
            for member in join.members:
                self._rows.add(join.task, member, self._vocabulary_size)
        for index, join in enumerate(batch):
            task = join.task
            if prefix is not None and task.prefix is None and task.waiting and not join.is_begun:
                mine = slice(index, index + 1)
                task.prefix = [(keys[mine].clone(), values[mine].clone()) for keys, values in prefix]
        self._sampling = None

    def _finish(self) -> None:
        """Completions whose last token ended them leave their rows."""
        active = self._rows.active
        is_end, by_text = self._is_end[active["next_id"]], ends_in_stop_text(self._rows, self._decode)
        done = is_end | by_text | (active["num_tokens"] >= active["limit"])
        if not done.any():
            return
        rows = np.flatnonzero(done).tolist()
        texts = self._decode([self._rows.token_ids(row) for row in rows])
        for row, text in zip(rows, texts, strict=True):
            task, index = self._rows.member(row)
            reason = FinishReason.STOP if is_end[row] or by_text[row] else FinishReason.LENGTH
            shown = before_stop(text, task.prompt.sampling.stop) if by_text[row] else text
            task.completions[index] = self._rows.completion(row, reason, shown)
            if len(task.completions) == task.size:
                self._outcomes.append((task, tuple(task.completions[member] for member in range(task.size))))
        self._remove(done)

    def _fail_nonfinite(self, is_bad: Bools) -> None:
        """A row whose distribution is not finite ends its group, and nothing of it stays in the cache."""
        if not is_bad.any():
            return
        tasks = list(dict.fromkeys(self._rows.member(row)[0] for row in np.flatnonzero(is_bad).tolist()))
        self._fail(tasks, EngineError(f"weights of version {self.weight_version} gave logits that are not finite"))
        self._cache.wipe(self._rows.num_rows)

    def _decode(self, token_ids: list[list[int]]) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts

    def _fail(self, tasks: Sequence[GroupTask], error: EngineError) -> None:
        self._discard(tasks)
        self._outcomes += [(task, error) for task in tasks]

    def _discard(self, tasks: Sequence[GroupTask]) -> None:
        self._waiting = deque(task for task in self._waiting if task not in tasks)
        mine = self._rows.rows_of(tasks)
        if mine.any():
            self._remove(mine)

    def _remove(self, gone: Bools) -> None:
        num_columns = self._rows.num_columns
        holes, movers = self._rows.remove(gone)
        if len(holes):
            self._cache.move(self._tensor(holes), self._tensor(movers), num_columns)
        self._sampling = None

    def _tensor(self, array: np.typing.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self._device)
