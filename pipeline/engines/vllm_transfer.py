"""New weights inside a vLLM worker process.

In: a description of shared memory that holds verified tensors, or the version that this worker has
fetched itself. Out: the worker's model with these weights, in whatever form vLLM keeps them. Runs
between two steps of the engine, and touches nothing before all tensors are there.
"""

from __future__ import annotations

import time
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

from pipeline.config import LoraSettings, ModelSettings
from pipeline.engines.shared_weights import SharedReader
from pipeline.engines.vllm_pull import Base, WeightPull
from pipeline.errors import WeightError
from pipeline.models.weights import dtype_named, host_tensor
from pipeline.weights import WeightKind
from pipeline.weights.manifest import TensorEntry

OWNED_S = 15.0


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What may be agreed on beforehand; may come again and again, and never takes long.

    shared, proof: memory of `SharedWeights.write`, only to find out whether it can be mapped here, and
    its content in hexadecimal digits, since another machine may have something else under the same path.
    publisher, settings: fields of `Endpoints` and `WeightSettings`; the worker begins to fetch the
    newest version above `newer_than`, and goes on generating. lora: fields of `LoraSettings`, where it
    fetches adapters and is to merge them into the weights below. owner: takes the worker for itself for
    `OWNED_S`, or keeps it; two that give weights at once would label each other's tokens.
    """

    owner: str = ""
    shared: Mapping[str, Any] | None = None
    proof: str = ""
    publisher: Mapping[str, str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    newer_than: int = -1
    lora: Mapping[str, Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One of both. shared: what `SharedWeights.write` returned in a process of this machine.

    pulled: the version that this worker has fetched. owner: refused while another has the worker.
    """

    owner: str = ""
    shared: Mapping[str, Any] | None = None
    pulled: int | None = None


class RollstreamTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The backend `rollstream`. The lifecycle is vLLM's: start, any number of updates, finish."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader = SharedReader()
        self._pull = WeightPull()
        self._owner, self._owned_until = "", 0.0

    @property
    def pull_status(self) -> dict[str, Any]:
        """Which version was fetched and waits, as plain values."""
        return self._pull.status

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Try the shared memory, begin to fetch. Raises WeightError: another owner, memory that cannot be mapped."""
        if init_info.owner:
            self._own(init_info.owner)
        if init_info.shared is not None:
            found = b"".join(bytes(data) for _, data in self._reader.read(init_info.shared))
            if found.hex() != init_info.proof:
                raise WeightError(f"{init_info.shared['path']} is not the memory that was meant")
        if init_info.publisher is not None:
            self._pull.follow(
                init_info.publisher,
                init_info.settings,
                newer_than=init_info.newer_than,
                base=self._base(init_info.lora) if init_info.lora else None,
            )

    def start_weight_update(self) -> None:
        """Nothing to do: the model is opened for loading when the tensors are there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one set of tensors. Raises WeightError before anything is touched, or whatever vLLM raises after."""
        info = self.parse_update_info(update_info)
        self._own(info.owner)
        self.receive_weights(info)
        self._own(info.owner)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @torch.inference_mode()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the tensors of `update_info`, as vLLM loads a checkpoint: sharded, fused, repacked."""
        tensors = self._tensors(update_info)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors))
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        if self.device.type == "cpu":
            _repack_experts(self.model)

    def _own(self, owner: str) -> None:
        now = time.monotonic()
        if self._owner and self._owner != owner and now < self._owned_until:
            raise WeightError("another generator gives it weights; a server belongs to one")
        self._owner, self._owned_until = owner, now + OWNED_S

    def _base(self, lora: Mapping[str, Any]) -> Base:
        """What adapters are merged into: the checkpoint that this worker serves."""
        config = self.model_config
        model = ModelSettings(path=config.model, trust_remote_code=config.trust_remote_code)
        return Base(model=model, lora=LoraSettings.model_validate(lora), dtype=config.dtype)

    def _tensors(self, update_info: UpdateInfo) -> list[tuple[str, torch.Tensor]]:
        if update_info.shared is not None:
            return [(item.name, _tensor(item, data)) for item, data in self._reader.read(update_info.shared)]
        if update_info.pulled is None:
            raise WeightError("the update names neither shared memory nor a version that was fetched")
        state = self._pull.take(update_info.pulled)
        if state.kind is not WeightKind.SNAPSHOT:
            raise WeightError(f"version {update_info.pulled} is of kind {state.kind.value}, vLLM takes full weights")
        return [(name, host_tensor(tensor)) for name, tensor in state.tensors.items()]

    def finish_weight_update(self) -> None:
        """Nothing to do: an update is complete when it returns."""

    def shutdown(self) -> None:
        """Forget the shared memory, fetch no more, belong to nobody."""
        self._owner = ""
        self._reader.close()
        self._pull.close()


def _tensor(item: TensorEntry, data: memoryview) -> torch.Tensor:
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
