"""Which experts the routers of a mixture-of-experts model choose: recorded in one pass, replayed in another.

In: a model whose routers are known. Out: the ids of the chosen experts, or a model that takes the
ids it is given. What an expert weighs is always the model's own: from its own logits, with gradient.

Replay of the generator's choice in the trainer: "Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers" (R3, arXiv 2510.11370); Routing Replay in GSPO (arXiv 2507.18071).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeline.batching import Routing
from pipeline.errors import ConfigError, MessageError, ModelError
from pipeline.messages import ExpertIds, expert_dtype

# Model type -> its router: a module that answers (logits [N, E], weights [N, K], ids [N, K]), whose
# weights are the softmax over all experts, of the chosen ones, divided by their sum where it says so.
_ROUTERS = {"qwen3_moe": "Qwen3MoeTopKRouter", "olmoe": "OlmoeTopKRouter"}

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PROBE_TOKENS = 8

_RouterOutput: TypeAlias = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routers:
    """modules: the routers, in the order of the layers. layers: which of the decoder's layers have them.

    num_experts, top_k: of each layer.
    """

    modules: tuple[nn.Module, ...]
    layers: tuple[int, ...]
    num_experts: int
    top_k: int


def check_model_type(model_type: str) -> None:
    """Raises ConfigError for a model whose routers are not known."""
    if model_type not in _ROUTERS:
        raise ConfigError(
            f"generation.replay_routing = true, but a model of type {model_type!r} has no router that can be "
            f"replayed ({', '.join(_ROUTERS)} have); set generation.replay_routing = false"
        )


def has_known_routers(model: Any) -> bool:
    """Whether `find_routers` finds some."""
    return bool(_router_modules(model))


def find_routers(model: Any) -> Routers:
    """The routers of a model, with or without its weights or an adapter. Raises ConfigError: there are none."""
    model_type = _model_type(model)
    check_model_type(model_type)
    found = _router_modules(model)
    if not found:
        raise ConfigError(
            f"generation.replay_routing = true, but this {model_type} has no layer with a router; "
            "set generation.replay_routing = false"
        )
    first: Any = next(iter(found.values()))
    numbers = [_LAYER.search(name) for name in found]
    assert all(numbers), f"routers outside of decoder layers: {list(found)}"
    return Routers(
        modules=tuple(found.values()),
        layers=tuple(int(number[1]) for number in numbers if number),
        num_experts=first.num_experts,
        top_k=first.top_k,
    )


def _model_type(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True).model_type)


def _router_modules(model: Any) -> dict[str, nn.Module]:
    kind = _ROUTERS.get(_model_type(model))
    return {name: module for name, module in model.named_modules() if type(module).__name__ == kind}


class RoutingRecorder:
    """Reads off what the routers of `model` choose."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ConfigError: `model` has no routers that are known."""
        self._routers = find_routers(model)
        self.num_experts = self._routers.num_experts

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """One forward pass. The list is what `ids` takes, afterwards."""
        chosen: list[Tensor] = []

        def keep(_router: nn.Module, _arguments: object, output: _RouterOutput) -> None:
            chosen.append(output[2])

        handles = [router.register_forward_hook(keep) for router in self._routers.modules]
        try:
            yield chosen
        finally:
            for handle in handles:
                handle.remove()

    def ids(self, chosen: list[Tensor]) -> ExpertIds:
        """Ids of all N tokens of the pass, row by row, [N, layers, top_k]."""
        stacked: ExpertIds = torch.stack(chosen, dim=1).cpu().numpy().astype(expert_dtype(self.num_experts))
        return stacked


class RoutingReplay:
    """Imposes recorded choices on the routers of `model`. Rows without a record keep the router's own choice."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ConfigError: `model` has no routers that are known; ModelError: they do something else."""
        self._routers = find_routers(model)
        self._current: Routing | None = None
        for router in self._routers.modules:
            _prove(router)
        self._hooks = [
            router.register_forward_hook(partial(self._replace, index))
            for index, router in enumerate(self._routers.modules)
        ]

    def remove(self) -> None:
        """Leave the routers alone from now on."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def using(self, routing: Routing | None) -> Iterator[None]:
        """Forward passes over the [B, L] tokens of `routing`; None replays nothing.

        Raises MessageError: the record is of another model.
        """
        if routing is not None:
            self._check(routing)
        before, self._current = self._current, routing
        try:
            yield
        finally:
            self._current = before

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of torch's checkpointing: what the backward pass computes again sees the same record."""
        return nullcontext(), self.using(self._current)

    def _check(self, routing: Routing) -> None:
        theirs = (*routing.experts.shape[2:], routing.num_experts)
        ours = (len(self._routers.layers), self._routers.top_k, self._routers.num_experts)
        if theirs != ours:
            raise MessageError(
                "routed experts are of another model: {} layers, {} of {} experts; ".format(*theirs)
                + "the trainer's has {} layers, {} of {} experts".format(*ours)
            )

    def _replace(self, index: int, router: nn.Module, _arguments: object, output: _RouterOutput) -> _RouterOutput:
        """Hook of router `index`. output: of B * L tokens, row by row."""
        routing = self._current
        if routing is None:
            return output
        logits, _, own = output
        recorded = routing.experts[:, :, index].flatten(0, 1).to(own.dtype)  # [B * L, K]
        ids = torch.where(routing.is_recorded.flatten()[:, None], recorded, own)
        return logits, _weights(router, logits, ids), ids


def _weights(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """What the chosen experts [N, K] weigh by the router's own logits [N, E]: its formula, for ids that are given."""
    weights = logits.softmax(dim=-1, dtype=torch.float).gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


@torch.no_grad()
def _prove(router: Any) -> None:
    """Given its own choice a router must get its own weights. Raises ModelError.

    One without weights is proven where they are.
    """
    if router.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_PROBE_TOKENS, router.hidden_dim, generator=generator).to(router.weight)
    logits, weights, ids = router(states)
    if not torch.allclose(_weights(router, logits, ids), weights, rtol=1e-3, atol=1e-5):
        raise ModelError(
            f"{type(router).__name__} of this transformers weighs its experts in another way than is known here; "
            "set generation.replay_routing = false"
        )
