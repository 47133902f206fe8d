"""Layers with the next weights, made beside those that vLLM computes with.

In: a model of vLLM on a CPU, and tensors. Out: the same model with these weights, of which only the exchange has to
happen between two steps: loading, fusing and packing, most of a second for half a gigabyte, happens while it
generates. Costs the memory of the weights once more until the exchange. Where a model has layers of another kind
than plain linear ones, embeddings and norms, nothing is made.

    tensors --> copies of the layers (load, fuse, pack: a thread) --> exchange --> what was in use is given back
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from pipeline.errors import WeightError

Module = torch.nn.Module
_PLAIN = {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


class Spare:
    """One set of layers at most, for one model. Everything but `prepare`'s work belongs to the worker's own thread."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._thread: threading.Thread | None = None
        self._version: int | None = None
        self._made: dict[Module, dict[str, Any]] = {}
        self._problem = ""

    @staticmethod
    def is_possible(model: Module) -> bool:
        """Whether loading changes nothing but the layers themselves."""
        methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
        return all(type(method) in _PLAIN for method in methods if isinstance(method, QuantizeMethodBase))

    @property
    def status(self) -> dict[str, Any]:
        """weight_version: for which layers are there, or None. problem: why there will be none."""
        return {"weight_version": self._version, "problem": self._problem}

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int) -> None:
        """Begin to make the layers of a version; returns at once. The tensors are read until it is there."""
        self.forget()
        self._problem = ""
        self._thread = threading.Thread(target=self._make, args=(tensors, weight_version), name="spare-layers")
        self._thread.start()

    def exchange(self, weight_version: int) -> None:
        """From now on the model has the weights of this version. Raises WeightError: they are not there."""
        if self._version != weight_version:
            raise WeightError(f"no layers were made for version {weight_version}; what is there: {self.status}")
        used = [layer.__dict__.copy() for layer in self._made]
        for layer, made in self._made.items():
            layer.__dict__.update(made)
        self._made, self._version = {}, None
        # To give memory back takes longer than all of the above.
        threading.Thread(target=used.clear, name="used-layers").start()

    def forget(self) -> None:
        """Nothing is being made any more, and nothing is there. Waits for what is under way."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self._version, self._made = None, None, {}

    @torch.inference_mode()
    def _make(self, tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int) -> None:
        torch.set_num_threads(1)  # of this thread: the others belong to those who wait for tokens
        try:
            self._made = _made_of(self._model, tensors)
            self._version = weight_version
        except Exception as error:  # noqa: BLE001  whatever it is, the weights can still be replaced without this
            self._problem = f"{type(error).__name__}: {error}"


def _made_of(model: Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[Module, dict[str, Any]]:
    """What loading makes of each layer that `tensors` have weights for: its attributes, tensors and what the kernels
    have packed. Raises WeightError."""
    copies: dict[Module, Module] = {}
    try:
        return {
            layer: {name: value for name, value in copy.__dict__.items() if layer.__dict__.get(name) is not value}
            for layer, copy in _loaded(_copied(model, copies), copies, tensors).items()
        }
    finally:
        for copy in copies.values():
            copy.__dict__.clear()  # they refer to each other, and would wait for the collector with all that they hold


def _loaded(
    root: Module, copies: Mapping[Module, Module], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[Module, Module]:
    """Those copies that there were tensors for, by the layer in use. Raises WeightError: not all have a place."""
    initialize_layerwise_reload(root)
    for copy in copies.values():
        layerwise.get_layerwise_info(copy).kernel_tensors = None  # those in use, which stay as they are
    given = list(tensors)
    sizes = {copy: layerwise.get_layerwise_info(copy).load_numel_total for copy in copies.values()}
    root.load_weights(iter(given))  # type: ignore[operator]
    taken = {layer: _num_taken(copy, sizes[copy]) for layer, copy in copies.items()}
    if sum(taken.values()) != sum(tensor.numel() for _, tensor in given):
        raise WeightError("vLLM did not take all of the weights")
    loaded = {layer: copies[layer] for layer, number in taken.items() if number}
    if any(is_deferred_attention_layer(layer) for layer in loaded):
        raise WeightError("the model has weights in its attention layers")
    loaded |= _tied_heads(loaded, copies)
    for copy in loaded.values():
        del copy.__dict__["_modules"]
    return loaded


def _copied(layer: Module, copies: dict[Module, Module]) -> Module:
    """The layer and those below it, which share everything with those in use but the places of their tensors."""
    if layer in copies:
        return copies[layer]
    copy = copies[layer] = object.__new__(type(layer))
    own = {name: layer.__dict__[name].copy() for name in ("_parameters", "_buffers", "_non_persistent_buffers_set")}
    below = {name: child and _copied(child, copies) for name, child in layer._modules.items()}
    copy.__dict__ = layer.__dict__ | own | {"_modules": below}
    known = layerwise.get_layerwise_info(layer)
    layerwise.LAYERWISE_INFO[copy] = LayerReloadingInfo(
        restore_metadata=tuple(_unloaded(tensors, layer) for tensors in known.restore_metadata),
        restore_device=known.restore_device,
    )
    return copy


def _unloaded(tensors: Mapping[str, torch.Tensor], layer: Module) -> dict[str, torch.Tensor]:
    """Shapes, each with the way to load it, which is the layer's in use: it asks that for sizes and ranks only."""
    found = {name: restore_layer_refs(to_meta_tensor(tensor), layer) for name, tensor in tensors.items()}
    for tensor in found.values():
        if hasattr(tensor, "weight_loader"):  # after an update of the layers in use it would load into those
            tensor.weight_loader = layerwise._get_original_loader(tensor)
    return found


def _num_taken(copy: Module, size: int) -> int:
    """Elements that there were for a copy; some layers have places that no tensor fills, and wait for these."""
    info = layerwise.get_layerwise_info(copy)
    if not info.can_load():
        return size
    number = int(info.load_numel)
    if number:
        layerwise._layerwise_process(copy, info)
    info.reset()
    return number


def _tied_heads(loaded: Mapping[Module, Module], copies: Mapping[Module, Module]) -> dict[Module, Module]:
    """Heads that have no tensors of their own, since they share those of an embedding, with what the kernels need."""
    heads = {}
    embeddings = {id(layer.weight): copy for layer, copy in loaded.items() if isinstance(layer, VocabParallelEmbedding)}
    for layer, copy in copies.items():
        if isinstance(layer, ParallelLMHead) and layer not in loaded and id(layer.weight) in embeddings:
            copy.__dict__.update(_parameters={**layer._parameters, "weight": embeddings[id(layer.weight)].weight})
            copy.__dict__.update(_buffers=layer._buffers)
            copy.quant_method.process_weights_after_loading(copy)  # type: ignore[union-attr, operator]
            heads[layer] = copy
    return heads
