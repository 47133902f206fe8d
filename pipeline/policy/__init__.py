"""The policy as the trainer sees it: logprobs of the tokens that were generated.

In: a causal language model (plain or with a LoRA adapter) and micro-batches. Out: logprobs of the
trained tokens under the temperature and truncation they were sampled with. Never holds the logits
of a whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.batching import Layout, MicroBatch
from pipeline.errors import ModelError
from pipeline.models.routing import RoutingReplay
from pipeline.policy.layout import choose_kernel, prove_layout
from pipeline.policy.logprobs import Targets, chunked_logprobs
from pipeline.policy.output_head import OutputHead, find_output_head, in_float32
from pipeline.policy.packed_attention import PackedMask, packed_mask, use_packed_attention
from pipeline.policy.top_logprobs import chunked_logprobs_with_top

CausalModel: TypeAlias = PreTrainedModel | PeftModel
# How a pass through a model is made, where its weights have to be gathered for it: work -> what it gives.
Run: TypeAlias = Callable[[Callable[[], Any]], Any]

_log = structlog.get_logger("pipeline.policy")


def directly(work: Callable[[], Any]) -> Any:
    """A pass through a model whose weights are here."""
    return work()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyOutput:
    """logprobs: [B, T] with gradient. entropies: [B, T] without. Both 0 outside the micro-batch's mask.
    top: [M, J, k + 1] with gradient, as of `chunked_logprobs_with_top`; None where not asked for."""

    logprobs: Tensor
    entropies: Tensor
    top: Tensor | None = None


class Policy:
    """A model and how to ask it for logprobs.

    logprob_chunk_tokens: tokens whose logits exist at once. autocast: precision of forward and
    backward where it differs from the weights'. float32_head: the output layer is computed in float32 all the
    same. reference: frozen copy of the initial model; with an
    adapter it is not needed, since the model without the adapter is the initial one. replay: of the
    model's routers, where the generator's choice of experts is replayed. layout: wanted of micro-batches;
    what the model can be trusted with is `layout`, and micro-batches must be of that, or padded; is_proven:
    it can be trusted with what is wanted. run, run_reference: how a pass through the two is made.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        logprob_chunk_tokens: int,
        autocast: torch.dtype | None = None,
        float32_head: bool = False,
        reference: PreTrainedModel | None = None,
        replay: RoutingReplay | None = None,
        layout: Layout = Layout.SHARED,
        is_proven: bool = False,
        run: Run = directly,
        run_reference: Run = directly,
    ) -> None:
        """Raises ModelError: float32_head, and a model that has no output layer of its own."""
        self.model = model
        self._passes = run
        self._reference_passes = run_reference
        self._chunk_tokens = logprob_chunk_tokens
        self._autocast = autocast
        self._float32_head = float32_head
        self._replay = replay
        quiet_dropout(model)
        causal = _causal_model(model)
        self._head = self._find_head(causal, run)
        self.layout = layout if is_proven else proven_layout(causal, self._head, layout)
        self._kernel = choose_kernel(causal, self.device)
        self._reference = reference
        for one in (causal, reference) if self.layout is not Layout.PADDED else ():
            if one is not None:
                use_packed_attention(one)
        self._reference_head = self._find_head(reference, run_reference) if reference is not None else self._head

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    def move(self, device: torch.device) -> None:
        """The model, and its reference where there is one, to another device."""
        models: list[nn.Module] = [self.model, *([self._reference] if self._reference is not None else [])]
        for model in models:
            model.to(device)

    @property
    def is_chunked(self) -> bool:
        """Whether logits are made a chunk at a time, which bounds memory."""
        return self._head.is_chunked

    @property
    def replays_routing(self) -> bool:
        """Whether experts are those that the generator's routers chose."""
        return self._replay is not None

    def evaluate(self, batch: MicroBatch, *, with_top: bool = False) -> PolicyOutput:
        """Logprobs and entropies of the trained tokens. Raises MessageError: experts recorded from another model.

        with_top: and of the ids that the batch's teachers have named.
        """
        with self._replay.using(batch.routing) if self._replay else contextlib.nullcontext():
            return self._run(self._head, batch, self._passes, with_top=with_top)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Logprobs of the trained tokens, [B, T] with gradient; 0 outside the mask."""
        return self.evaluate(batch).logprobs

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """The same by the initial policy, without gradient and with the experts that its own routers choose."""
        if self._reference is None:
            assert isinstance(self.model, PeftModel), "a reference needs an adapter to switch off, or a copy"
            with self.model.disable_adapter():
                return self._run(self._head, batch, self._passes).logprobs
        return self._run(self._reference_head, batch, self._reference_passes).logprobs

    def _run(self, head: OutputHead, batch: MicroBatch, run: Run, *, with_top: bool = False) -> PolicyOutput:
        targets = Targets(token_ids=batch.targets, temperatures=batch.temperatures, kept=batch.kept)
        top, chunk_tokens = batch.teacher_top if with_top else None, self._chunk_tokens

        def ask() -> tuple[Tensor, Tensor, Tensor | None]:
            states = head.states(batch.input_ids, self._mask(batch), batch.position_ids)  # [R, L, H]
            states = states.flatten(0, 1)[batch.state_index]  # [M, H]
            if top is not None:
                return chunked_logprobs_with_top(states, targets, top, head.project, chunk_tokens=chunk_tokens)
            of_tokens = chunked_logprobs(
                states, targets, head.project, chunk_tokens=chunk_tokens, is_trained=head.is_trained
            )
            return *of_tokens, None

        with self._precision():
            logprobs, entropies, of_top = run(ask)
        return PolicyOutput(logprobs=batch.scatter(logprobs), entropies=batch.scatter(entropies), top=of_top)

    def _mask(self, batch: MicroBatch) -> Tensor | PackedMask | None:
        if batch.segments is None:
            return batch.attention_mask
        return packed_mask(batch.segments, batch.input_ids.device, self._kernel)

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def _find_head(self, model: PreTrainedModel, run: Run) -> OutputHead:
        with torch.no_grad(), contextlib.nullcontext() if run is directly else self._precision():
            head: OutputHead = run(lambda: find_output_head(model))
        if head.is_chunked:
            return in_float32(head) if self._float32_head else head
        if self._float32_head:
            raise ModelError(
                f"trainer.head_dtype = 'float32' needs an output layer that can be used by itself, and "
                f"{type(model).__name__} does something of its own to its logits; set trainer.head_dtype = 'auto', or "
                "trainer.dtype = 'float32'"
            )
        _log.warning(
            "logits_not_chunked",
            architecture=type(model).__name__,
            consequence="memory grows with micro_batch_tokens x vocabulary; lower trainer.micro_batch_tokens",
        )
        return head


def proven_layout(model: CausalModel, head: OutputHead | None, wanted: Layout) -> Layout:
    """What `model` can be trusted with; says why, where that is less than is wanted. head: None finds it."""
    causal = _causal_model(model)
    proven = prove_layout(causal, head or find_output_head(causal), wanted)
    if proven.reason:
        _log.warning(
            "micro_batch_layout",
            architecture=type(causal).__name__,
            layout=str(proven.layout),
            wanted=str(wanted),
            reason=proven.reason,
            consequence="right, but slower: more tokens than needed go through the model",
        )
    return proven.layout


def quiet_dropout(model: nn.Module) -> None:
    """Evaluation mode, so that trainer and generator agree; only what must know of training does.

    Gradient checkpointing looks at the flag of its own layer, and an adapter's dropout, which is off
    unless the settings ask for it, at its own.
    """
    model.eval()
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) or "lora_dropout" in name:
            module.training = True


def _causal_model(model: CausalModel) -> PreTrainedModel:
    if not isinstance(model, PeftModel):
        return model
    inner = model.get_base_model()
    assert isinstance(inner, PreTrainedModel)
    return inner
