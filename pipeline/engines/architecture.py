"""Whether a model can be decoded row by row, found out before the first prompt.

In: a loaded model. Out: nothing, or a ModelError that says what is in the way. Layers with a window
or a state of their own are refused by kind; anything else that would go wrong shows in a probe that
compares the decoder with a plain forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from pipeline.batching import pad_routing
from pipeline.engines.decoding import Decoder
from pipeline.engines.rows import GroupTask
from pipeline.errors import ModelError
from pipeline.messages import Completion, PromptGroup, SamplingParams
from pipeline.models.routing import RoutingRecorder, RoutingReplay, has_known_routers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE_TOKENS = 3


def end_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion: the model's and the tokenizer's."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(configured) if isinstance(configured, list) else {configured}
    return tuple(sorted(int(token) for token in ids | {tokenizer.eos_token_id} if token is not None))


def check_architecture(model: Any, tokenizer: PreTrainedTokenizerBase, *, context: int) -> None:
    """Raises ModelError when the decoder would not give what a plain forward pass gives.

    Where the routers of a mixture of experts are known, both go to the same experts: that two kernels
    round a close decision apart is not the decoder's fault.
    """
    config = model.config.get_text_config(decoder=True)
    for layer in DynamicCache(config=config).layers:
        window = getattr(layer, "sliding_window", None)
        if type(layer) is not DynamicLayer and not (window is not None and window >= context):
            raise ModelError(
                f"{type(model).__name__}: its layers of kind {type(layer).__name__} cannot be decoded row by row; "
                "use a model with full attention, or lower model.max_context to its window"
            )
    _probe(model, tokenizer, min(context, 12))


def _probe(model: Any, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
    longest = context - _PROBE_TOKENS
    if longest < 1:
        return
    recorder = RoutingRecorder(model) if has_known_routers(model) else None
    decoder = Decoder(model, tokenizer, end_ids=(), max_num_seqs=3, recorder=recorder)
    decoder.weight_version = 0
    for ordinal, length in enumerate((longest, (longest + 1) // 2)):
        decoder.submit(GroupTask(prompt=_prompt(ordinal, length), limit=_PROBE_TOKENS))
    while decoder.has_work:
        decoder.step()
    # Half precision rounds differently in every kernel; a wrong position or mask is off by far more.
    tolerance = 2e-3 if model.dtype is torch.float32 else 0.5
    for task, outcome in decoder.take_outcomes():
        if isinstance(outcome, Exception):
            raise ModelError(f"{type(model).__name__} cannot be decoded row by row: {outcome}") from outcome
        gap = _gap(model, task.prompt.prompt_token_ids.tolist(), outcome)
        if not gap <= tolerance:
            raise ModelError(
                f"{type(model).__name__} cannot be decoded row by row: its log-probabilities differ "
                f"from a plain forward pass by {gap:.3g}"
            )


def _prompt(ordinal: int, length: int) -> PromptGroup:
    return PromptGroup(
        group_id=f"probe-{ordinal}",
        ordinal=ordinal,
        dataset_index=0,
        epoch=0,
        prompt="",
        prompt_token_ids=np.arange(1, length + 1, dtype=np.uint32),
        columns={},
        sampling=SamplingParams(group_size=2, max_tokens=_PROBE_TOKENS, keep_routed_experts=True),
        fed_version=0,
        min_version=0,
    )


@torch.inference_mode()
def _gap(model: Any, prompt: list[int], completions: Sequence[Completion]) -> float:
    ids = torch.tensor([prompt + completion.token_ids.tolist() for completion in completions], device=model.device)
    with _replaying(model, completions, ids.shape[1]):
        logprobs = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].float().log_softmax(-1)
    expected = logprobs.gather(2, ids[:, len(prompt) :, None])[:, :, 0].cpu().numpy()
    drawn = np.stack([completion.generator_logprobs for completion in completions])
    return float(np.abs(expected - drawn).max())


@contextmanager
def _replaying(model: Any, completions: Sequence[Completion], num_columns: int) -> Iterator[None]:
    routing = pad_routing(completions, num_columns)
    if routing is None:
        yield
        return
    replay = RoutingReplay(model)
    try:
        with replay.using(routing.to(model.device)):
            yield
    finally:
        replay.remove()
