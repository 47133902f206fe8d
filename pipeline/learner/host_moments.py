"""AdamW's moments in host memory, on the device only while their weight is stepped.

In: an optimiser whose gradients are there. Out: the same step, one weight after the other, to the last bit.
A rank has the moments of its own part of a weight that is spread.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.ranks.tensors import is_spread, local_part, spread_as

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostMoments:
    """Between steps `adamw.state` has the moments as plain tensors of the CPU."""

    def __init__(self, adamw: torch.optim.AdamW) -> None:
        self._adamw = adamw
        self._parameters: list[nn.Parameter] = [value for group in adamw.param_groups for value in group["params"]]
        self._memory: dict[tuple[nn.Parameter, str], Tensor] = {}

    def step(self) -> None:
        """The optimiser's step; on the device are the moments of one weight at a time."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            state = self._adamw.state[parameter]
            for name in MOMENTS if state else ():
                state[name] = self.on_device(parameter, state[name])
            parameter.grad = gradient
            self._adamw.step()
            parameter.grad = None
            self.put_away(parameter)

    def on_device(self, parameter: nn.Parameter, moment: Tensor) -> Tensor:
        """A copy of what was put away, where its weight is and spread as that is."""
        copy = moment.to(local_part(parameter).device, copy=True)
        return spread_as(parameter, copy) if is_spread(parameter) else copy

    def put_away(self, parameter: nn.Parameter) -> None:
        """The moments of one weight to host memory, which is taken once; pinned where they come from a GPU."""
        state = self._adamw.state[parameter]
        for name in MOMENTS:
            moment = local_part(state[name])
            if (parameter, name) not in self._memory:
                memory = torch.empty_like(moment, device="cpu", pin_memory=local_part(parameter).is_cuda)
                self._memory[parameter, name] = memory
            state[name] = self._memory[parameter, name].copy_(moment)
