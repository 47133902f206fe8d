"""A look at all tokens of a step before it begins.

In: samples and the policy as it is. Out: logprobs of every token by trainer and reference, for what
can only be known over the whole batch: a KL term inside the reward, the limit of m2po. It costs one
forward pass more, and happens only where the algorithm asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.algorithms import Algorithm, m2po_limit
from pipeline.algorithms.distillation import reverse_kl_advantages
from pipeline.algorithms.ratios import usable_ratios
from pipeline.batching import Sample, arrange
from pipeline.policy import Policy
from pipeline.ranks.dealing import shortest
from pipeline.ranks.world import World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Logprobs of M token positions, one completion after the other, on the CPU; 0 where not trained on.

    ref_logprobs: None without a KL term. generator_logprobs, ages: of the same tokens. mask: [M] bool.
    teacher_logprobs: NaN where there is none.
    """

    trainer_logprobs: Tensor
    generator_logprobs: Tensor
    ages: Tensor
    mask: Tensor
    teacher_logprobs: Tensor
    ref_logprobs: Tensor | None

    def penalties(self, algorithm: Algorithm) -> Tensor | None:
        """kl_coef * k of every token, [M] float64, where the KL term is in the reward; 0 where it is not finite."""
        if self.ref_logprobs is None or algorithm.settings.kl_in != "reward":
            return None
        divergence = algorithm.divergence((self.ref_logprobs - self.trainer_logprobs).double())
        return algorithm.settings.kl_coef * torch.where(self.mask & torch.isfinite(divergence), divergence, 0.0)

    def limit(self, algorithm: Algorithm, advantages: Tensor) -> Tensor | None:
        """The limit of m2po, where that is the correction. advantages: [M]."""
        if algorithm.settings.correction != "m2po":
            return None
        is_usable = self.mask & usable_ratios(self.trainer_logprobs, self.generator_logprobs)
        if self.ref_logprobs is not None:
            is_usable = is_usable & torch.isfinite(self.ref_logprobs)
        advantages = advantages + algorithm.settings.distillation * reverse_kl_advantages(
            self.teacher_logprobs, self.trainer_logprobs
        )
        anchor = algorithm.anchor(self.trainer_logprobs, self.generator_logprobs, self.ages)
        return m2po_limit(
            (anchor - self.generator_logprobs)[is_usable].double(), advantages[is_usable], algorithm.settings
        )


@torch.no_grad()
def survey(
    policy: Policy,
    samples: Sequence[Sample],
    micro_batches: Sequence[Sequence[int]],
    *,
    with_reference: bool,
    world: World,
) -> Survey:
    """Ask `policy`, and its reference, for every token. micro_batches: this rank's, each of indices of samples."""
    trainer = [torch.zeros(len(sample.mask), dtype=torch.float64) for sample in samples]
    reference = [row.clone() for row in trainer]
    for dealt in micro_batches:
        rows = dealt or [shortest(samples)]
        chosen, values = [samples[row] for row in rows], [trainer[row] for row in rows]
        batch = arrange(chosen, values, torch.zeros(len(rows)), policy.layout).to(policy.device)
        _fill(trainer, dealt, policy.logprobs(batch))
        if with_reference:
            _fill(reference, dealt, policy.reference_logprobs(batch))
    return Survey(
        trainer_logprobs=_summed(trainer, world),
        generator_logprobs=_joined([torch.tensor(item.completion.generator_logprobs).double() for item in samples]),
        ages=_joined([torch.from_numpy(sample.ages) for sample in samples]),
        mask=_joined([torch.from_numpy(sample.mask) for sample in samples]),
        teacher_logprobs=_joined([torch.from_numpy(sample.teacher_logprobs).double() for sample in samples]),
        ref_logprobs=_summed(reference, world) if with_reference else None,
    )


def _fill(into: list[Tensor], rows: Sequence[int], logprobs: Tensor) -> None:
    """logprobs: [B, T], padded. rows: empty where they count for nothing."""
    for row, values in zip(rows, logprobs.double().cpu() if rows else (), strict=True):
        into[row] = values[: len(into[row])]


def _summed(parts: Sequence[Tensor], world: World) -> Tensor:
    """Each sample's row is 0 on all ranks but one."""
    joined = _joined(parts).to(world.device)
    world.add(joined)
    return joined.cpu()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0)
