"""New weights inside a vLLM worker process.

In: a description of shared memory that holds verified tensors. Out: the worker's model with these
weights, in whatever form vLLM keeps them. Runs between two steps of the engine, and touches
nothing before all tensors are mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from pipeline.engines.shared_weights import SharedReader, SharedTensor
from pipeline.errors import WeightError
from pipeline.model_weights import dtype_named


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """shared: what `SharedWeights.write` returned in a process of this machine."""

    shared: Mapping[str, Any] = field(default_factory=dict)


class RollstreamTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The backend `rollstream`. The lifecycle is vLLM's: start, any number of updates, finish."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader = SharedReader()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: every update says where its tensors lie."""

    def start_weight_update(self) -> None:
        """Nothing to do: the model is opened for loading when the tensors are there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one set of tensors. Raises WeightError before anything is touched, or whatever vLLM raises after."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @torch.inference_mode()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the tensors of `update_info`, as vLLM loads a checkpoint: sharded, fused, repacked."""
        tensors = [(item.name, _tensor(item, data)) for item, data in self._reader.read(update_info.shared)]
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors))
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        if self.device.type == "cpu":
            _repack_experts(self.model)

    def finish_weight_update(self) -> None:
        """Nothing to do: an update is complete when it returns."""

    def shutdown(self) -> None:
        """Forget the shared memory."""
        self._reader.close()


def _tensor(item: SharedTensor, data: memoryview) -> torch.Tensor:
    dtype = dtype_named(item.dtype)
    if not item.num_bytes:
        return torch.empty(item.shape, dtype=dtype)
    tensor = torch.frombuffer(data, dtype=dtype)
    if tensor.numel() != torch.Size(item.shape).numel():
        raise WeightError(f"{item.name} has {item.num_bytes} bytes, which is not its shape {list(item.shape)}")
    return tensor.reshape(item.shape)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """An output head that shares the embedding's tensor keeps a packed copy, which loading leaves as it was."""
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    addresses = {module.weight.data_ptr() for module in embeddings}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in addresses:
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: torch.nn.Module) -> None:
    """On a CPU the kernel wants the experts packed, and vLLM packs them only when it loads them for the first time."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
