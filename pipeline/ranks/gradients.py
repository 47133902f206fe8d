"""Gradients of ranks that each hold all weights: summed once a step, when all micro-batches are done.

In: parameters with the gradients of one rank's micro-batches. Out: the same with those of all ranks.
Sums, not means: the loss is normalised over the whole batch before it is dealt out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pipeline.ranks.world import World

_BUCKET_BYTES = 64 << 20


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """A parameter that no rank has a gradient of goes on without one."""
    if world.is_alone:
        return
    has_any = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=world.device)
    world.add(has_any)
    touched = [parameter for parameter, number in zip(parameters, has_any.tolist(), strict=True) if number]
    for parameter in touched:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in touched if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        world.add(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, of about `_BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        num_bytes = sum(each.nbytes for each in bucket)
        if bucket and (gradient.dtype is not bucket[0].dtype or num_bytes + gradient.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
