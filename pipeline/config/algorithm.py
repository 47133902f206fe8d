"""Settings of what the trainer optimises, and what they mean once the preset has filled them in.

In: the table `[algorithm]`. Out: `AlgorithmSettings`, whose `resolved` has no empty choice left.
Names of functions are looked up by `pipeline.algorithms`, which needs torch; here they are words.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config.base import LARGEST_FACTOR, Count, Factor, Fraction, Natural, PositiveFactor, Section
from pipeline.config.presets import PRESETS, Preset

AtLeastOne = Annotated[float, Field(ge=1, le=LARGEST_FACTOR, allow_inf_nan=False)]
# Of a gate of height 4 / tau: below, float32 has no digits left for its slope.
Tau = Annotated[float, Field(ge=1e-3, le=LARGEST_FACTOR, allow_inf_nan=False)]

GroupReward = Annotated[float, Field(allow_inf_nan=False)] | Literal["off"]

# Corrections that weigh tokens: they need something other than the generator to form their weight from.
WEIGHTING = frozenset(
    {"importance", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_tis", "geometric_mis"}
)
_CHOICES = ("advantage", "loss", "correction", "aggregation", "proximal", "kl_estimator", "kl_in")


class AlgorithmSettings(Section):
    """What the trainer optimises. Empty names take the preset's choice."""

    preset: str = Field(
        "grpo",
        description="Names an advantage, a loss, a correction and an aggregation: " + ", ".join(PRESETS) + ".",
    )
    advantage: str = Field(
        "",
        description="How rewards become advantages: group_mean_std, group_mean, rloo, reinforce_pp, "
        "reinforce_pp_baseline, maxrl, gdpo, opo, none.",
    )
    loss: str = Field("", description="The policy loss: ppo_clip, gspo, cispo, sapo, gmpo, topr, dppo.")
    correction: str = Field(
        "",
        description="How generator and trainer are reconciled: none, importance, tis, mis, icepop, sequence_tis, "
        "sequence_mis, geometric_tis, geometric_mis, m2po, opsm.",
    )
    aggregation: str = Field(
        "", description="How token losses become one number: token_mean, sequence_mean, sequence_sum, constant."
    )
    proximal: Literal["", "generator", "recomputed", "interpolated"] = Field(
        "",
        description="What the loss forms its ratio against: generator (as sampled), recomputed (the trainer before the "
        "update), interpolated (between the two, by age). Empty: the preset's, else generator with a correction that "
        "does not weigh tokens and recomputed with one that does.",
    )
    clip_low: Fraction = Field(
        0.2,
        description="ppo_clip: the ratio is clipped below 1 - clip_low. Acts unless proximal is recomputed, where the "
        "ratio is 1 at the one update that each batch gets.",
    )
    clip_high: Factor = Field(
        0.28, description="ppo_clip: the ratio is clipped above 1 + clip_high. Acts as clip_low does."
    )
    dual_clip: Factor = Field(
        0.0, description="ppo_clip: with a negative advantage the ratio counts at most this, 3 for example; 0 is off."
    )
    gspo_clip_low: Fraction = Field(0.03, description="gspo: as clip_low, for the ratio of a whole completion.")
    gspo_clip_high: Factor = Field(0.04, description="gspo: as clip_high, for the ratio of a whole completion.")
    cispo_max: PositiveFactor = Field(5.0, description="cispo: cap of the importance weight.")
    sapo_tau_positive: Tau = Field(
        1.0, description="sapo: how fast a token with a positive advantage fades as its ratio leaves 1."
    )
    sapo_tau_negative: Tau = Field(1.05, description="sapo: the same with a negative advantage.")
    gmpo_clip: PositiveFactor = Field(0.4, description="gmpo: log-ratios of tokens are clipped to this, in nats.")
    dppo_divergence: Literal["tv", "kl"] = Field(
        "tv", description="dppo: total variation or KL divergence of the drawn token against all others."
    )
    dppo_max: PositiveFactor = Field(
        0.15, description="dppo: tokens that would go on beyond this divergence are masked."
    )
    truncation: PositiveFactor = Field(2.0, description="Cap of the importance weight; mis masks what is above.")
    band_low: PositiveFactor = Field(0.5, description="icepop: tokens with a smaller importance weight are masked.")
    band_high: AtLeastOne = Field(5.0, description="icepop: tokens with a larger importance weight are masked.")
    geometric_band: AtLeastOne = Field(
        1.2, description="geometric_mis: completions whose mean weight is above this, or below 1 / this, are masked."
    )
    m2po_max: PositiveFactor = Field(
        0.04, description="m2po: tokens with the largest log-ratios are masked until their mean square is at most this."
    )
    opsm_max: PositiveFactor = Field(
        0.1, description="opsm: completions with a negative advantage and a larger divergence, in nats, are masked."
    )
    aggregation_length: Natural = Field(
        0, description="constant: tokens that a completion is divided by; 0 takes generation.max_tokens."
    )
    process: Literal["none", "returns", "align"] = Field(
        "none",
        description="Rewards of tokens or steps, where scores have them: none, returns (of what is still to come), or "
        "align (around the completion's own advantage).",
    )
    process_weight: Factor = Field(1.0, description="Factor of the token rewards' part.")
    overlong: bool | Literal["preset"] = Field(
        "preset", description="Completions near generation.max_tokens lose reward; preset: only with dapo."
    )
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="Share of generation.max_tokens, at its end, in which the loss of reward grows."
    )
    overlong_penalty: Factor = Field(1.0, description="Reward lost by a completion of full length.")
    distillation_coef: Factor | Literal["preset"] = Field(
        "preset",
        description="Weight of what scoring.teachers say of each token, added to its advantage; preset: 1 with opd, "
        "else 0.",
    )
    jsd_coef: Factor = Field(
        0.0,
        description="Weight, in the loss, of the generalised Jensen-Shannon divergence from what scoring.teachers find "
        "likeliest (their top_k); 0 leaves it out.",
    )
    jsd_beta: Fraction = Field(
        0.5, description="0 is the forward KL divergence, KL(teacher || policy), 1 the reverse, 0.5 is symmetric."
    )
    kl_coef: Factor = Field(0.0, description="Weight of the KL divergence to the initial policy; 0 loads no reference.")
    kl_estimator: Literal["", "k1", "k2", "k3"] = Field("", description="How it is estimated: k1, k2, k3.")
    kl_in: Literal["", "loss", "reward"] = Field(
        "", description="Where it is: loss, or reward (which takes one more forward pass)."
    )
    kl_importance: bool = Field(
        False, description="In the loss: weigh it by the importance ratio, which makes k1 and k3 exact on old tokens."
    )
    drop_zero_variance: bool | Literal["preset"] = Field(
        "preset",
        description="Groups whose rewards are all equal are dropped and replaced; preset: only with dapo.",
    )
    min_group_reward: GroupReward = Field(
        "off",
        description="Groups whose mean reward is below this are dropped and replaced, as those that are too hard.",
    )
    max_group_reward: GroupReward = Field(
        "off", description="The same above this, as those that are too easy: 0.9 drops what is nearly always right."
    )
    max_refill: Count = Field(
        10, description="Give up when this many batches' worth of groups was filtered for one step."
    )

    @property
    def resolved(self) -> AlgorithmSettings:
        """The same with every choice filled in from the preset. An unknown preset changes nothing."""
        preset = PRESETS.get(self.preset)
        if preset is None:
            return self
        filled: dict[str, Any] = {name: getattr(self, name) or getattr(preset, name) for name in _CHOICES}
        filled["proximal"] = self.proximal or _proximal(preset, filled["correction"])
        for name in ("overlong", "drop_zero_variance"):
            chosen = getattr(self, name)
            filled[name] = getattr(preset, name) if chosen == "preset" else chosen
        if self.has_teacher and self.drop_zero_variance == "preset":
            filled["drop_zero_variance"] = False  # a teacher tells more of them than their rewards do
        return self.model_copy(update=filled)

    @property
    def group_reward_range(self) -> tuple[float, float]:
        """Lowest and highest mean reward of a group to train on; infinite where there is no bound."""
        lowest, highest = self.min_group_reward, self.max_group_reward
        return (-math.inf if lowest == "off" else lowest, math.inf if highest == "off" else highest)

    @property
    def distillation(self) -> float:
        """Weight of the teachers' part; 0 without."""
        if self.distillation_coef != "preset":
            return self.distillation_coef
        preset = PRESETS.get(self.preset)
        return preset.distillation if preset else 0.0

    @property
    def has_teacher(self) -> bool:
        """Whether anything is learnt from teachers."""
        return self.distillation > 0 or self.jsd_coef > 0

    @property
    def needs_survey(self) -> bool:
        """Whether a step looks at all its tokens before it begins, with one more forward pass."""
        resolved = self.resolved
        return resolved.correction == "m2po" or (resolved.kl_coef > 0 and resolved.kl_in == "reward")


def _proximal(preset: Preset, correction: str) -> str:
    """The preset's where it suits the correction, which a setting may have replaced."""
    if correction in WEIGHTING:
        return preset.proximal or "recomputed"
    return "generator"
