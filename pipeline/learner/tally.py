"""Sums of per-token values over the micro-batches of a step.

In: values of every token and a mask. Out: means, maxima and counts as plain floats, read from the
device once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.ranks.world import World


class TokenTally:
    """Means over the tokens that took part, the same for any split."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor], mask: Tensor, *, largest: tuple[str, ...] = ()) -> None:
        """values: name -> [B, T]. mask: [B, T] bool. largest: names whose maximum is wanted too."""
        self._num_tokens += mask.sum()
        for name, value in values.items():
            masked = torch.where(mask, value.detach(), 0.0)
            self._sums[name] = self._sums.get(name, 0.0) + masked.double().sum()
            if name in largest:
                self._largest[name] = torch.maximum(self._largest.get(name, masked.new_zeros(())), masked.max())

    def join(self, world: World) -> None:
        """Add up what all ranks have seen; all have seen values of the same names."""
        if world.is_alone:
            return
        names, maxima = sorted(self._sums), sorted(self._largest)
        sums = torch.stack([self._num_tokens.double(), *(self._sums[name] for name in names)])
        world.add(sums)
        self._num_tokens = sums[0].round().long()
        self._sums = dict(zip(names, sums[1:], strict=True))
        if maxima:
            largest = torch.stack([self._largest[name].double() for name in maxima])
            world.largest(largest)
            self._largest = dict(zip(maxima, largest, strict=True))

    def means(self) -> dict[str, float]:
        """Mean of every value; 0 without tokens."""
        count = max(1, self.num_tokens)
        return {name: float(total) / count for name, total in self._sums.items()}

    def maxima(self) -> dict[str, float]:
        """Maximum of every value that was asked for, at least 0."""
        return {name: float(value) for name, value in self._largest.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens that took part."""
        return int(self._num_tokens)


def describe_tokens(tally: TokenTally) -> dict[str, float]:
    """Means over the trained tokens; a term that the algorithm does not have is 0."""
    absent = ("clip_fraction", "truncated_fraction", "masked_fraction", "kl", "entropy", "mismatch_kl")
    means = dict.fromkeys(absent, 0.0) | tally.means()
    taught, top_taught = means.pop("taught", 0.0), means.pop("top_taught", 0.0)
    for name, share in (("teacher_kl", taught), ("teacher_jsd", top_taught), ("teacher_top_mass", top_taught)):
        means[name] = means.get(name, 0.0) / share if share else 0.0
    return means | {
        "importance_ratio_mean": means.pop("importance_ratio", 0.0),
        "importance_ratio_max": tally.maxima().get("importance_ratio", 0.0),
    }
