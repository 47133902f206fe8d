"""A policy as it was at one moment, in host memory, to be written while training goes on.

In: a model that is being trained. Out: a directory that other programs load, and the learner's state.
What training never changes is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.config import ModelSettings
from pipeline.models.files import as_the_umask_says
from pipeline.models.loading import load_tokenizer, quiet
from pipeline.ranks.tensors import is_spread, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySnapshot:
    """model: for its configuration and its way to write itself; its weights are not looked at."""

    model: Any
    weights: Mapping[str, torch.Tensor]
    state: dict[str, Any]
    model_settings: ModelSettings | None

    def state_dict(self) -> dict[str, Any]:
        """As the learner's was."""
        return self.state

    def save_model(self, directory: Path) -> None:
        """A Hugging Face directory with the weights (or the adapter) and the tokenizer."""
        with quiet():
            self.model.save_pretrained(str(directory), state_dict=dict(self.weights))
            as_the_umask_says(directory)
            if self.model_settings is not None:
                load_tokenizer(self.model_settings).save_pretrained(directory)


def weights_to_save(
    model: torch.nn.Module, dtype: torch.dtype | None, *, is_kept: bool = True
) -> dict[str, torch.Tensor]:
    """Name -> tensor in host memory, of `dtype` where it is given. Tensors that share memory go on sharing it.

    Of a model with an adapter only what is trained, which is all that is written of it. What is spread
    over ranks is gathered one tensor at a time, and all have to ask. is_kept: False on a rank that only helps.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    owners = {name: id(parameter) for name, parameter in parameters.items()}
    copies: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    is_adapter = hasattr(model, "peft_config")
    for name, tensor in model.state_dict().items():
        if is_adapter and name not in trained:
            continue
        address = 0 if is_spread(tensor) else tensor.data_ptr()
        key = (owners[name] if is_spread(tensor) else address, tensor.shape, tensor.stride())
        if key not in copies:
            wanted = whole(tensor.to(dtype=dtype if tensor.is_floating_point() else None)).to("cpu")
            is_same = wanted.data_ptr() == address
            copies[key] = wanted.clone() if is_same and (name in trained or not tensor.is_floating_point()) else wanted
        found[name] = copies[key]
    return found if is_kept else {}
