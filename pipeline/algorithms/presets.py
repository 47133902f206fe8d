"""Algorithms by name: each names one entry of every table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Names of an advantage, a loss, a correction and an aggregation."""

    advantage: str
    loss: str
    correction: str
    aggregation: str


PRESETS: dict[str, Preset] = {
    # GRPO, arXiv 2402.03300, with a token mean and truncated importance sampling for old tokens.
    "grpo": Preset(advantage="group_mean_std", loss="ppo_clip", correction="tis", aggregation="token_mean"),
}
