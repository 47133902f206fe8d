"""Weights that are spread over ranks, and tensors on their way between one rank and all.

In: a model that rank 0 has loaded and the others have without its weights. Out: the same model on
every rank, each with a part of every weight (FSDP2), or with all of them. A tensor is whole on a device one
at a time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.errors import ModelError
from pipeline.models.layers import decoder_layers
from pipeline.ranks.world import World

Result = TypeVar("Result")


class Root(nn.Module):
    """Any pass through a model, as one forward pass of a module, which is what FSDP gathers weights around.

    The output head and what goes before the first layer are whole from the first to the last of a pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Result]) -> Result:
        """What `work` gives."""
        return work()


def shard(model: nn.Module, world: World, *, dtype: torch.dtype | None) -> Callable[[Callable[[], Any]], Any]:
    """Spread the weights of `model`; returns how a pass through it is to be made.

    dtype: of the layers' weights in forward and backward; gradients are summed in float32. None
    leaves both as they are.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    root = Root(model)
    layers = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype is not None else None, cast_forward_inputs=False
    )
    for module in decoder_layers(model):
        fully_shard(module, mesh=mesh, mp_policy=layers)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)
    if not world.leads:
        root.to_empty(device=world.device)

    def run(work: Callable[[], Result]) -> Result:
        result: Result = root(work)
        if not torch.is_grad_enabled():
            # Without a backward pass the root would stay whole, as it is now, beyond the next step.
            root.reshard()  # type: ignore[operator]
        return result

    return run


def replicate(model: nn.Module, world: World) -> None:
    """All weights of `model` on every rank's device; those of others than rank 0 are not set yet."""
    if world.leads:
        model.to(world.device)
        return
    model.to_empty(device=world.device)
    for module in model.modules():
        # What `to_empty` makes is made once for each name, also of tensors that are one.
        if callable(tie := getattr(module, "tie_weights", None)):
            tie()
            return


def agree_on_tensors(model: nn.Module, world: World) -> None:
    """Give every rank's model the types of rank 0's. Raises ModelError where names or shapes differ."""
    ours = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors_of(model)}
    theirs: dict[str, tuple[list[int], str]] = world.share(ours)
    differing = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name, ("",))[0] != theirs.get(name, ("",))[0]
    )
    if differing:
        raise ModelError(f"rank {world.rank} has another model than rank 0: {differing[0]} differs")
    for name, tensor in tensors_of(model):
        dtype = getattr(torch, theirs[name][1].removeprefix("torch."))
        if tensor.dtype is not dtype:
            tensor.data = tensor.data.to(dtype)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def copies_of(model: nn.Module) -> dict[str, Tensor]:
    """What rank 0 has loaded, by name, before it is spread."""
    return {name: tensor.detach() for name, tensor in tensors_of(model)}


@torch.no_grad()
def spread_over(model: nn.Module, world: World, originals: Mapping[str, Tensor]) -> None:
    """Rank 0's tensors into the model of every rank. originals: of rank 0; empty on others."""
    for name, tensor in tensors_of(model):
        tensor.copy_(spread(originals.get(name), tensor, world))


def spread(whole: Tensor | None, like: Tensor, world: World) -> Tensor:
    """Rank 0's tensor on every rank, of the type and on the device of `like`, and sharded as that is.

    whole: on rank 0; not looked at on others.
    """
    if world.is_alone:
        assert whole is not None, "rank 0 has all tensors"
        return whole
    if world.leads:
        assert whole is not None, "rank 0 has all tensors"
        tensor = whole.detach().to(device=world.device, dtype=like.dtype).contiguous()
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=world.device)
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements)
    if world.leads and whole is not None and tensor.data_ptr() == whole.data_ptr():
        tensor = tensor.clone()
    world.from_leader(tensor)
    return tensor
