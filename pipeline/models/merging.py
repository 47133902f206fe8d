"""An adapter merged into the weights below it: W + scale * B @ A, for engines that serve whole weights.

In: the tensors of an adapter, as they came from the trainer. Out: the same policy as full weights.
The base weights are kept in host memory in their own precision; sums are made in float32 and rounded
once, to what the engine serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.config import LoraSettings, ModelSettings
from pipeline.errors import ModelError
from pipeline.models.loading import load_config, load_model
from pipeline.models.weights import ADAPTER_MARK, apply_staged, stage_weights, to_host
from pipeline.weights import HostTensor, WeightKind, WeightState

_PREFIX, _BASE = "base_model.model.", ".base_layer."
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+\.")


class LoraMerger:
    """Base weights and the newest adapter on top of them. dtype: of the tensors that it gives; None keeps theirs."""

    def __init__(self, model: ModelSettings, lora: LoraSettings, *, dtype: torch.dtype | None = None) -> None:
        """Load the base weights. Raises ModelError, also for a module that shares its weights with another."""
        own_dtype = getattr(load_config(model), "dtype", None) or torch.float32
        cpu = torch.device("cpu")
        exact = lora.model_copy(update={"quantization": "none"})
        self._model = load_model(model, exact, device=cpu, dtype=own_dtype, seed=0, trainable=False)
        self._dtype = dtype
        self._adapted = _adapted_modules(self._model)

    def merge(self, state: WeightState, *, only_touched: bool = False) -> WeightState:
        """The full weights under an adapter, as a snapshot of the same version.

        only_touched: of the decoder layers that have an adapted module, and nothing of the others; a
        layer is given whole because engines fuse its modules. Raises WeightError: it does not fit.
        """
        apply_staged(stage_weights(self._model, state))
        blocks = {_block(f"{name}.weight") for name in self._adapted} if only_touched else None
        return WeightState(
            weight_version=state.weight_version, kind=WeightKind.SNAPSHOT, tensors=dict(self._tensors(blocks))
        )

    @torch.no_grad()
    def _tensors(self, blocks: set[str] | None) -> Iterator[tuple[str, HostTensor]]:
        for name, parameter in self._model.named_parameters():
            plain = name.removeprefix(_PREFIX).replace(_BASE, ".")
            if ADAPTER_MARK in name or (blocks is not None and _block(plain) not in blocks):
                continue
            module_name, _, kind = plain.rpartition(".")
            adapted = self._adapted.get(module_name) if kind == "weight" else None
            merged = parameter if adapted is None else parameter.float() + _delta(adapted)
            yield plain, to_host(merged, self._dtype or parameter.dtype)


def _delta(adapted: torch.nn.Module) -> torch.Tensor:
    """What PEFT would add to the weight, with its scale and in its orientation, in float32."""
    delta: torch.Tensor = adapted.get_delta_weight("default")  # type: ignore[operator]
    return delta.float()


def _adapted_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Name, as without an adapter -> PEFT's layer around it."""
    from peft.tuners.lora import LoraLayer

    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer: Any = module
        plain = name.removeprefix(_PREFIX)
        if owners[id(layer.get_base_layer().weight)] > 1:
            raise ModelError(
                f"lora.target_modules adapts {plain}, which shares its weights with another module: merged, the "
                "adapter would change both; leave it out, or set generation.merge_lora = false"
            )
        found[plain] = layer
    return found


def _block(name: str) -> str:
    """The layer of the decoder that a tensor belongs to, else its module."""
    match = _BLOCK.match(name)
    return match[0] if match else name.rpartition(".")[0]
