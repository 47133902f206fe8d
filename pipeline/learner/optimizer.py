"""AdamW that takes only finite steps, the same on all ranks.

In: gradients. Out: weights one step further, or the same weights and the news that the step was
skipped. Its state, with the weights it steers, is all that an identical continuation needs, and does not
depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.config import TrainerSettings
from pipeline.errors import ModelError
from pipeline.learner.host_moments import MOMENTS, HostMoments
from pipeline.learner.schedule import check_schedule, learning_rate
from pipeline.ranks.gradients import sum_gradients
from pipeline.ranks.tensors import is_spread, whole
from pipeline.ranks.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What became of one step. grad_norm: before clipping; may be inf or NaN when not applied."""

    grad_norm: float
    learning_rate: float
    is_applied: bool


class Optimizer:
    """AdamW on float32 weights with clipped gradients and a schedule that depends on the step alone."""

    def __init__(self, model: nn.Module, trainer: TrainerSettings, world: World) -> None:
        """Raises ConfigError for a schedule that needs an end and has none."""
        check_schedule(trainer)
        self._world = world
        self._trainer = trainer
        self._parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._is_sharded = any(is_spread(parameter) for parameter in self._parameters.values())
        self._adamw = torch.optim.AdamW(
            _decayed_apart(self._parameters, trainer.weight_decay),
            lr=trainer.learning_rate,
            betas=(trainer.beta1, trainer.beta2),
            foreach=True if self._is_sharded else None,
        )
        self._host = HostMoments(self._adamw) if trainer.offload_optimizer else None
        self._is_on_gpu = any(parameter.is_cuda for parameter in self._parameters.values())
        self._num_steps = 0

    def begin(self) -> None:
        """Before a step's first micro-batch: an adapter's dropout differs between ranks, and is the same again
        when the run is resumed."""
        if not self._world.leads:
            torch.manual_seed((self._num_steps << 20) + self._world.rank)

    def step(self, loss: Tensor) -> Update:
        """Clip and apply the gradients that are there; skip when they or `loss` are not finite.

        A gradient of exactly 0, as of a batch in which all rewards of each group are equal, changes
        neither weights nor moments: AdamW would go on by its momentum, and forget the scale of the
        gradients, so that the next one moved the weights too far. The schedule goes on in every case: it
        counts the batches that were used up.
        """
        rate = learning_rate(self._trainer, self._num_steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        if not self._is_sharded:
            sum_gradients([*self._parameters.values()], self._world)
        norm = whole(nn.utils.clip_grad_norm_(self._parameters.values(), self._trainer.max_grad_norm))
        self._require_the_same(norm)
        is_applied = bool(torch.isfinite(norm) & torch.isfinite(loss))
        if is_applied and norm > 0:
            (self._host or self._adamw).step()
        self._adamw.zero_grad(set_to_none=True)
        self._num_steps += 1
        return Update(grad_norm=float(norm), learning_rate=rate, is_applied=is_applied)

    def skip(self) -> Update:
        """Let a batch without anything to train on pass."""
        self._adamw.zero_grad(set_to_none=True)
        self._num_steps += 1
        return Update(grad_norm=0.0, learning_rate=learning_rate(self._trainer, self._num_steps - 1), is_applied=False)

    def _require_the_same(self, norm: Tensor) -> None:
        """Ranks that each step by themselves would grow apart without a sign."""
        if self._world.is_alone:
            return
        value = torch.nan_to_num(norm.detach().double())
        bounds = torch.stack([value, -value])
        self._world.largest(bounds)
        if bounds[0] != -bounds[1]:
            raise RuntimeError(f"ranks have summed their gradients to different norms: {-bounds[1]} to {bounds[0]}")

    def move(self, device: torch.device) -> None:
        """The moments to another device; the weights go with their model."""
        for state in self._adamw.state.values() if self._host is None else ():
            for name in MOMENTS:
                state[name] = state[name].to(device)

    def state_dict(self) -> dict[str, object]:
        """Weights, moments, step and random state; tensors, numbers, lists and dicts only.

        A copy in host memory: it may be written to disk while the next step runs. Of several ranks rank 0
        gets it, the others nothing. What is spread over them is gathered one tensor at a time.
        """
        is_kept = self._world.leads
        weights, adamw = _host_copy(dict(self._parameters), is_kept), self._adamw_state(is_kept)
        if not is_kept:
            return {}
        state: dict[str, object] = {
            "num_steps": self._num_steps,
            "weights": weights,
            "adamw": adamw,
            "rng": torch.get_rng_state(),
        }
        if self._is_on_gpu:
            state["cuda_rng"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` gave, which rank 0 has. Raises ModelError where the weights do not fit."""
        if self._world.leads:
            self.check(state)
        weights = cast("Mapping[str, Tensor]", state.get("weights", {}))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._spread(weights.get(name), parameter))
        self._load_adamw(cast("dict[str, Any]", state.get("adamw", {})))
        self._num_steps = self._world.share(cast(int, state.get("num_steps", 0)))
        if not self._world.leads:
            return
        torch.set_rng_state(cast(Tensor, state["rng"]).cpu())
        if "cuda_rng" in state and self._is_on_gpu:
            torch.cuda.set_rng_state_all([rng.cpu() for rng in cast("list[Tensor]", state["cuda_rng"])])

    def _adamw_state(self, is_kept: bool) -> dict[str, Any]:
        state: dict[str, Any] = self._adamw.state_dict()
        if self._host is None or not self._is_sharded:
            return cast("dict[str, Any]", _host_copy(state, is_kept))
        whole_state = {}
        for index, of_one in state["state"].items():
            parameter = self._in_order[index]
            moments = {name: _host_copy(self._host.on_device(parameter, of_one[name]), is_kept) for name in MOMENTS}
            whole_state[index] = _host_copy(of_one, is_kept) | moments
        return {"state": whole_state, "param_groups": state["param_groups"]}

    def _load_adamw(self, state: Mapping[str, Any]) -> None:
        """state: of torch's AdamW, by the place of a parameter in its groups; of rank 0."""
        if self._world.is_alone and self._host is None:
            self._adamw.load_state_dict(dict(state))
            return
        outline = {"groups": state.get("param_groups"), "steps": _steps_of(state.get("state", {}))}
        outline = self._world.share(outline)
        self._adamw.load_state_dict({"state": {}, "param_groups": outline["groups"]})
        for index, step in outline["steps"]:
            parameter, theirs = self._in_order[index], state["state"][index] if self._world.leads else {}
            moments = {name: self._spread(theirs.get(name), parameter) for name in MOMENTS}
            self._adamw.state[parameter] = {"step": torch.tensor(step), **moments}
            if self._host is not None:
                self._host.put_away(parameter)

    @property
    def _in_order(self) -> list[nn.Parameter]:
        """As torch's state counts them."""
        return [parameter for group in self._adamw.param_groups for parameter in group["params"]]

    def _spread(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        if self._world.is_alone:
            assert tensor is not None, "checked before"
            return tensor
        from pipeline.ranks.sharding import spread

        return spread(tensor, like, self._world)

    def check(self, state: Mapping[str, object]) -> None:
        """Raises ModelError where a state's weights do not fit."""
        weights = cast("Mapping[str, Tensor]", state["weights"])
        ours = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if differing:
            raise ModelError(
                f"the checkpoint is of another model: {differing[0]} is {theirs.get(differing[0], 'absent')} there and "
                f"{ours.get(differing[0], 'absent')} here ({len(differing)} differ); use another run.name or "
                "the model and lora settings that it was written with"
            )


def _decayed_apart(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and vectors (norms, biases), which do not."""
    matrices = [value for value in parameters.values() if value.ndim >= 2]
    vectors = [value for value in parameters.values() if value.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _steps_of(states: Mapping[int, Mapping[str, Tensor]]) -> list[tuple[int, float]]:
    return [(index, float(state["step"])) for index, state in states.items()]


def _host_copy(value: Any, is_kept: bool) -> Any:
    """A nest of dicts and lists with every tensor copied to the CPU. is_kept: False only helps other ranks to."""
    if isinstance(value, Tensor):
        gathered = whole(value.detach())
        return gathered.to("cpu", copy=True) if is_kept else None
    if isinstance(value, dict):
        return {key: _host_copy(item, is_kept) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_host_copy(item, is_kept) for item in value]
    return value
