"""The weights of a model as host tensors, and back into the model in place.

In: a Hugging Face model, or a `WeightState` for it. Out: host tensors, or the model with new
weights. Nothing is ever replaced before every name, shape and type has been checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
import xxhash

from pipeline.errors import ConfigError, WeightError, few
from pipeline.ranks.tensors import whole
from pipeline.weights import HostTensor, WeightKind, WeightState

Staged: TypeAlias = list[tuple[torch.nn.Parameter, torch.Tensor]]

ADAPTER_MARK = ".lora_"


def weight_kind(model: torch.nn.Module) -> WeightKind:
    """What travels for this model: the adapter where it has one, else everything."""
    return WeightKind.ADAPTER if hasattr(model, "peft_config") else WeightKind.SNAPSHOT


def export_weights(
    model: torch.nn.Module,
    *,
    kind: WeightKind | None = None,
    dtype: torch.dtype | None = None,
    is_kept: bool = True,
) -> dict[str, HostTensor]:
    """The weights in host memory; tied tensors once, under their first name.

    What already lies there in the right type is not copied: it changes with the model. What is spread
    over ranks is gathered one tensor at a time, and all ranks have to ask.
    kind: defaults to `weight_kind(model)`. dtype: convert to it; None keeps each tensor's own.
    is_kept: False on a rank that only helps to gather; it gets nothing.
    """
    tensors = {}
    for name, parameter in _travelling(model, kind or weight_kind(model)).items():
        gathered = whole(parameter.detach().to(dtype or parameter.dtype))
        if is_kept:
            tensors[name] = to_host(gathered, dtype)
    return tensors


def num_weight_bytes(model: torch.nn.Module, *, dtype: torch.dtype | None = None) -> int:
    """Size of what `export_weights` gives, without making it."""
    sent = _travelling(model, weight_kind(model)).values()
    return sum(parameter.numel() * (dtype or parameter.dtype).itemsize for parameter in sent)


def stage_weights(model: torch.nn.Module, state: WeightState) -> Staged:
    """Pair every tensor of `state` with the parameter it replaces, and check all of them.

    Changes nothing. Raises WeightError: another kind, missing or unknown names, another shape,
    fewer bytes than the shape needs, a type that is no floating-point type, or values that are not finite: what
    an engine reads with such weights it keeps, and vLLM's attention on a CPU meets it again under later ones.
    """
    if state.kind is not weight_kind(model):
        raise WeightError(f"weights are of kind {state.kind.value}, the model takes {weight_kind(model).value}")
    targets = _travelling(model, state.kind)
    missing, unknown = targets.keys() - state.tensors.keys(), state.tensors.keys() - targets.keys()
    if missing or unknown:
        raise WeightError(f"weights do not fit the model: missing {few(missing)}, unknown {few(unknown)}")
    return [(target, _from_host(name, state.tensors[name], target)) for name, target in targets.items()]


def apply_staged(staged: Staged) -> None:
    """Copy staged tensors into their parameters, in place; rounds to the parameter's precision."""
    with torch.no_grad():
        for target, source in staged:
            target.copy_(source)


def apply_weights(model: torch.nn.Module, state: WeightState) -> None:
    """Replace the model's weights in place. Raises WeightError before anything is changed."""
    apply_staged(stage_weights(model, state))


def state_checksum(model: torch.nn.Module) -> str:
    """xxh3-128 over names, types, shapes and bytes of all that `export_weights` gives."""
    return tensors_checksum(export_weights(model))


def tensors_checksum(tensors: Mapping[str, HostTensor]) -> str:
    """xxh3-128 over names, types, shapes and bytes, in the order of the names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def _travelling(model: torch.nn.Module, kind: WeightKind) -> dict[str, torch.nn.Parameter]:
    """Parameters that are sent; `named_parameters` gives a tied one under its first name only."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if kind is WeightKind.SNAPSHOT or ADAPTER_MARK in name
    }


def to_host(parameter: torch.Tensor, dtype: torch.dtype | None) -> HostTensor:
    """In host memory; where it is there already, no copy. dtype: convert to it; None keeps the tensor's own."""
    host = parameter.detach().to("cpu", dtype or parameter.dtype).contiguous()
    return HostTensor(
        dtype=str(host.dtype).removeprefix("torch."),
        shape=tuple(host.shape),
        data=host.reshape(-1).view(torch.uint8).numpy().data,
    )


def _from_host(name: str, tensor: HostTensor, target: torch.nn.Parameter) -> torch.Tensor:
    if tensor.shape != tuple(target.shape):
        raise WeightError(f"{name} has shape {tensor.shape}, the model's has {tuple(target.shape)}")
    try:
        dtype = dtype_named(tensor.dtype)
    except ConfigError as error:
        raise WeightError(f"{name} has the type {tensor.dtype!r}") from error
    if dtype.is_floating_point != target.dtype.is_floating_point:
        raise WeightError(f"{name} has the type {tensor.dtype}, the model's has {target.dtype}")
    if tensor.data.nbytes != target.numel() * dtype.itemsize:
        raise WeightError(f"{name} has {tensor.data.nbytes} bytes, its shape needs {target.numel() * dtype.itemsize}")
    found = host_tensor(tensor)
    if found.is_floating_point() and not _is_finite(found):
        raise WeightError(f"{name} has values that are not finite")
    return found


def _is_finite(tensor: torch.Tensor) -> bool:
    """A sum, made at the speed of memory, is finite only where all values are; where it is not, each is looked at."""
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    total = wide.sum(dtype=torch.promote_types(wide.dtype, torch.float32))
    return bool(total.isfinite() or wide.isfinite().all())


def host_tensor(tensor: HostTensor) -> torch.Tensor:
    """The same memory as a tensor of torch. Raises ConfigError: a type that torch does not have."""
    dtype = dtype_named(tensor.dtype)
    if not tensor.data.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    # torch refuses to share read-only memory without a warning, so such tensors are copied once.
    buffer = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)


def dtype_named(name: str) -> torch.dtype:
    """torch's type of this name. Raises ConfigError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is no tensor type of torch")
    return dtype
