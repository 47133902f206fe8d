"""All versions of a model that a test has served."""

from __future__ import annotations

import copy

import torch

from pipeline.weights import WeightState
from tests.engines.conftest import state_of


def stepped(model: torch.nn.Module, *, seed: int, amount: float) -> torch.nn.Module:
    """The model after a step in a random direction of whatever is trained, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return model


class History:
    """Versions from 0 on, each a step of size `amount` away from the first, in a random direction of its own.

    They do not add up: of weights that grow with every update a fast machine would get larger ones than a slow
    one, and larger logits, of which rounding leaves more.
    """

    def __init__(self, model: torch.nn.Module, *, amount: float = 0.05) -> None:
        self._amount = amount
        self._models = [copy.deepcopy(model)]
        self._num_given = 0

    @property
    def newest(self) -> int:
        """The last version that `next` gave."""
        return self._num_given - 1

    def next(self) -> WeightState:
        """The next version, as a trainer would publish it."""
        if self._num_given == len(self._models):
            self._models.append(stepped(copy.deepcopy(self._models[0]), seed=self._num_given, amount=self._amount))
        self._num_given += 1
        return self.state(self.newest)

    def state(self, version: int) -> WeightState:
        """A version again."""
        return state_of(self._models[version], version)

    def model(self, version: int) -> torch.nn.Module:
        """The model that drew tokens of this version."""
        return self._models[version]
