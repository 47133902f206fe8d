"""How far the trainer is from what the generators sampled, by the age of the tokens.

In: log-ratios, ages and what a correction did, of every trained token of a step. Out: plain floats
with the age in their names; ages from 3 on are one. A name is there only where tokens of its age are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.ranks.world import World

OLDEST = 3
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
SHARES = ("truncated_fraction", "masked_fraction")


class AgeTally:
    """Sums and ratios of a step, the same for any split."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(OLDEST + 1, dtype=torch.float64, device=device)
        self._sums = {name: torch.zeros_like(self._counts) for name in (*SHARES, "mismatch_kl", "teacher_kl", "taught")}
        self._moments = torch.zeros(2, dtype=torch.float64, device=device)
        self._seen: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor], log_ratios: Tensor, ages: Tensor, mask: Tensor) -> None:
        """values: name -> [B, T]. log_ratios: [B, T], of trainer over generator. ages: [B, T]. mask: [B, T] bool."""
        ages, log_ratios = ages[mask].clamp(max=OLDEST), log_ratios[mask].detach()  # [K]
        self._counts.index_add_(0, ages, torch.ones_like(ages, dtype=torch.float64))
        for name, sums in self._sums.items():
            if name in values:
                sums.index_add_(0, ages, values[name][mask].double())
        ratios = log_ratios.double().exp()
        self._moments += torch.stack([ratios.sum(), ratios.square().sum()])
        self._seen.append((ages, log_ratios))

    def join(self, world: World) -> None:
        """Add up what all ranks have seen."""
        if world.is_alone:
            return
        world.add(self._counts, self._moments, *self._sums.values())
        seen = [torch.stack([ages.double(), ratios.double()], dim=1) for ages, ratios in self._seen]  # [K, 2]
        rows = world.gather_rows(torch.cat(seen) if seen else self._counts.new_zeros(0, 2))
        self._seen = [(rows[:, 0].long(), rows[:, 1])]

    def describe(self) -> dict[str, float]:
        """effective_sample_size: (sum rho)^2 / (K sum rho^2) over K tokens, 1 where all ratios are equal.

        mismatch_kl_fresh, mismatch_kl_stale: over tokens of the trainer's version, where only engines
        differ, and over older ones. For each age: tokens, shares that the correction cut or masked, and
        quantiles of the importance ratio.
        """
        counts = self._counts.cpu().numpy()
        sums = {name: values.cpu().numpy() for name, values in self._sums.items()}
        total, squares = self._moments.tolist()
        described = {
            "effective_sample_size": total**2 / (counts.sum() * squares) if squares else 1.0,
            "mismatch_kl_fresh": _mean(sums["mismatch_kl"][:1], counts[:1]),
            "mismatch_kl_stale": _mean(sums["mismatch_kl"][1:], counts[1:]),
        }
        for age in np.flatnonzero(counts).tolist():
            described[f"tokens_age_{age}"] = float(counts[age])
            described |= {f"{name}_age_{age}": float(sums[name][age] / counts[age]) for name in SHARES}
            if sums["taught"][age]:
                described[f"teacher_kl_age_{age}"] = float(sums["teacher_kl"][age] / sums["taught"][age])
            described |= {f"ratio_{name}_age_{age}": value for name, value in self._quantiles(age).items()}
        return described

    def _quantiles(self, age: int) -> dict[str, float]:
        ratios = np.concatenate([values[ages == age].double().cpu().numpy() for ages, values in self._seen])
        found = np.exp(np.quantile(ratios, list(QUANTILES.values())))
        return dict(zip(QUANTILES, found.tolist(), strict=True))


def _mean(sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> float:
    return float(sums.sum() / max(1.0, counts.sum()))
