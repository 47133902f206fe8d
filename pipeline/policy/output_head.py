"""From hidden states to logits, for any causal language model.

In: a model. Out: its decoder, its output layer and what the architecture does to the logits
afterwards (soft cap, scale), proven on a few tokens against the model's own logits. A model that
does something else is used whole: right, but with all logits in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from pipeline.policy.packed_attention import PackedMask

_PROBE_TOKENS = 8
_PROBE_MAGNITUDE = 50.0
_TOLERANCE = 1e-3


def _identity(logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputHead:
    """states: input_ids, attention_mask, position_ids, each [B, L] -> states [B, L, H].

    project: [m, H] -> logits [m, V]. Without position_ids they count from 0, which is right for rows that
    are padded on the right.
    is_chunked: False where the states are the logits themselves and `project` changes nothing.
    layer, transform: `project` is the one after the other.
    """

    states: Callable[[Tensor, Tensor | PackedMask | None, Tensor | None], Tensor]
    project: Callable[[Tensor], Tensor]
    is_chunked: bool
    layer: nn.Module | None = None
    transform: Callable[[Tensor], Tensor] = _identity

    @property
    def is_trained(self) -> bool:
        """Whether `project` has to be differentiated by its weights, or has none."""
        return self.layer is None or any(weight.requires_grad for weight in self.layer.parameters())


def find_output_head(model: PreTrainedModel) -> OutputHead:
    """The chunkable head of `model` where one reproduces its logits, else the model as a whole."""
    decoder, layer = _parts(model)
    if decoder is not None and decoder is not model and layer is not None:
        for transform in _transforms(model):
            head = _head(decoder, layer, transform)
            if _reproduces(model, layer, head):
                return head
    return OutputHead(
        states=partial(_logits, model),
        project=_identity,
        is_chunked=False,
    )


def in_float32(head: OutputHead) -> OutputHead:
    """A chunkable head whose matrix product is made in float32, with states and weights as they are."""
    layer = head.layer
    assert layer is not None, "a head that is not chunked has no layer of its own"

    def project(hidden: Tensor) -> Tensor:
        weights = {name: _widened(weight) for name, weight in layer.named_parameters()}
        with torch.autocast(hidden.device.type, enabled=False):
            return head.transform(functional_call(layer, weights, (_widened(hidden),)))

    return replace(head, project=project)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _parts(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """Decoder and output layer, where transformers knows them."""
    decoder: nn.Module | None = model.get_decoder()  # type: ignore[no-untyped-call]
    layer: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return decoder, layer


def _head(decoder: nn.Module, layer: nn.Module, transform: Callable[[Tensor], Tensor]) -> OutputHead:
    def states(input_ids: Tensor, attention_mask: Tensor | PackedMask | None, position_ids: Tensor | None) -> Tensor:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        output = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions)
        hidden = output.last_hidden_state
        assert isinstance(hidden, Tensor)
        return hidden

    return OutputHead(
        states=states,
        project=lambda hidden: transform(layer(hidden)),
        is_chunked=True,
        layer=layer,
        transform=transform,
    )


def _logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | PackedMask | None,
    position_ids: Tensor | None,
) -> Tensor:
    positions = {} if position_ids is None else {"position_ids": position_ids}
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions).logits
    assert isinstance(logits, Tensor)
    return logits


def _transforms(model: PreTrainedModel) -> Iterator[Callable[[Tensor], Tensor]]:
    """What the architecture may do to the output layer's logits, the most specific first."""
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        yield partial(_soft_cap, cap=float(cap))  # Gemma 2 and 3
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        scale = getattr(config, name, None)
        if isinstance(scale, int | float) and scale not in {0, 1}:
            yield partial(torch.mul, other=scale)  # Cohere, Falcon-H1
            yield partial(torch.div, other=scale)  # Granite
    yield _identity


def _soft_cap(logits: Tensor, *, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap


@torch.no_grad()
def _reproduces(model: PreTrainedModel, layer: nn.Module, head: OutputHead) -> bool:
    """Whether `head` gives the model's own logits on a few tokens.

    A hook enlarges the output layer's logits for both sides: on the small logits of a fresh model a
    soft cap would look like the identity.
    """
    device = next(model.parameters()).device
    token_ids = torch.arange(_PROBE_TOKENS, device=device)[None] % model.config.get_text_config().vocab_size
    try:
        largest = float(layer(head.states(token_ids, None, None)).abs().max())
    except (AttributeError, TypeError):  # a decoder with a call or an answer of its own
        return False
    factor = _PROBE_MAGNITUDE / max(largest, 1e-6)
    handle = layer.register_forward_hook(lambda _module, _arguments, output: output * factor)
    try:
        own = _logits(model, token_ids, None, None)
        ours = head.project(head.states(token_ids, None, None))
    finally:
        handle.remove()
    return own.shape == ours.shape and bool((own - ours).abs().max() <= _TOLERANCE * own.abs().max())
