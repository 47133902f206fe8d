"""Algorithms by name: each names one entry of every table, and what else belongs to it.

Plain data, so that a process without torch can ask what a preset means.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pipeline.errors import ConfigError

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Names of an advantage, a loss, a correction and an aggregation.

    proximal: what the loss forms its ratio against; empty for what suits the correction.
    kl_estimator, kl_in: of the KL term, where kl_coef asks for one.
    distillation: weight of a teacher's part.
    drop_zero_variance, overlong: whether the algorithm samples dynamically, and shapes long completions.
    """

    advantage: str
    loss: str
    correction: str
    aggregation: str
    proximal: str = ""
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    drop_zero_variance: bool = False
    overlong: bool = False
    distillation: float = 0.0


PRESETS: dict[str, Preset] = {
    # GRPO, arXiv 2402.03300, with a token mean and truncated importance sampling for old tokens.
    "grpo": Preset(advantage="group_mean_std", loss="ppo_clip", correction="tis", aggregation="token_mean"),
    # Dr. GRPO, arXiv 2503.20783: neither the spread of the rewards nor the length of a completion weighs.
    "dr_grpo": Preset(advantage="group_mean", loss="ppo_clip", correction="tis", aggregation="constant"),
    # DAPO, arXiv 2503.14476: clip-higher against the generator, token mean, dynamic sampling, overlong shaping.
    "dapo": Preset(
        advantage="group_mean_std",
        loss="ppo_clip",
        correction="none",
        aggregation="token_mean",
        drop_zero_variance=True,
        overlong=True,
    ),
    # RLOO, arXiv 2402.14740: REINFORCE on whole completions, the KL term inside the reward.
    "rloo": Preset(
        advantage="rloo",
        loss="ppo_clip",
        correction="tis",
        aggregation="sequence_sum",
        kl_estimator="k1",
        kl_in="reward",
    ),
    # REINFORCE++, arXiv 2501.03262, and its form with the group as the baseline.
    "reinforce_pp": Preset(
        advantage="reinforce_pp",
        loss="ppo_clip",
        correction="tis",
        aggregation="token_mean",
        kl_estimator="k1",
        kl_in="reward",
    ),
    "reinforce_pp_baseline": Preset(
        advantage="reinforce_pp_baseline",
        loss="ppo_clip",
        correction="tis",
        aggregation="token_mean",
        kl_estimator="k2",
    ),
    # GSPO, arXiv 2507.18071.
    "gspo": Preset(advantage="group_mean_std", loss="gspo", correction="none", aggregation="sequence_mean"),
    # CISPO, arXiv 2506.13585.
    "cispo": Preset(advantage="group_mean_std", loss="cispo", correction="none", aggregation="token_mean"),
    # SAPO, arXiv 2511.20347.
    "sapo": Preset(advantage="group_mean_std", loss="sapo", correction="none", aggregation="sequence_mean"),
    # GMPO, arXiv 2507.20673.
    "gmpo": Preset(advantage="group_mean_std", loss="gmpo", correction="none", aggregation="sequence_mean"),
    # Decoupled PPO, arXiv 2505.24298, with the interpolated proximal policy of A-3PO, arXiv 2512.06547.
    "decoupled_ppo": Preset(
        advantage="group_mean_std",
        loss="ppo_clip",
        correction="tis",
        aggregation="token_mean",
        proximal="interpolated",
    ),
    # TOPR, arXiv 2503.14286.
    "topr": Preset(advantage="group_mean", loss="topr", correction="none", aggregation="sequence_sum"),
    # DPPO, arXiv 2602.04879.
    "dppo": Preset(advantage="group_mean_std", loss="dppo", correction="none", aggregation="token_mean"),
    # MaxRL, arXiv 2602.02710.
    "maxrl": Preset(advantage="maxrl", loss="ppo_clip", correction="tis", aggregation="token_mean"),
    # On-policy distillation with the reverse KL divergence, arXiv 2306.13649: a teacher says how good each token is.
    "opd": Preset(advantage="none", loss="ppo_clip", correction="tis", aggregation="token_mean", distillation=1.0),
}


def look_up(setting: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """What is in a table under a name that a setting gives. Raises ConfigError for a name that is not."""
    if name in table:
        return table[name]
    nearest = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ConfigError(f"algorithm.{setting} = {name!r} is not known{hint} There are: {', '.join(sorted(table))}")
