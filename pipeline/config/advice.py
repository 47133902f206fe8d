"""Choices that are known to fail, or to do nothing, said before they do.

In: the settings of a run. Out: one sentence for each, with what follows and the way out. None of
them is an error: there are reasons to try them.
"""

from __future__ import annotations

from pipeline.config.algorithm import AlgorithmSettings
from pipeline.config.generation import GenerationSettings
from pipeline.config.learning import StalenessSettings
from pipeline.config.unread import unread


def advice(algorithm: AlgorithmSettings, generation: GenerationSettings, staleness: StalenessSettings) -> list[str]:
    """What to think over in these settings."""
    resolved = algorithm.resolved
    found = unread(algorithm)
    if (generation.top_p < 1.0 or generation.top_k > 0) and not generation.replay_sampling_mask:
        found.append(
            "generation.replay_sampling_mask = false with top_p or top_k: importance ratios are off by the probability "
            "that was cut; set it to true, or top_p = 1 and top_k = 0"
        )
    if resolved.correction == "importance" and staleness.max_staleness > 1:
        found.append(
            f"algorithm.correction = 'importance' with staleness.max_staleness = {staleness.max_staleness}: weights of "
            "tokens older than one version have no bound, and their variance grows with age; set it to 'tis'"
        )
    if (
        resolved.kl_coef > 0
        and resolved.kl_estimator == "k1"
        and resolved.kl_in == "loss"
        and not resolved.kl_importance
    ):
        found.append(
            "algorithm.kl_estimator = 'k1' with algorithm.kl_in = 'loss': the gradient of the term is 0 on average, it "
            "only adds noise; set kl_estimator to 'k2' or 'k3', kl_in to 'reward', or kl_importance to true"
        )
    if resolved.kl_coef > 0 and resolved.kl_estimator == "k2" and resolved.kl_in == "loss" and resolved.kl_importance:
        found.append(
            "algorithm.kl_importance = true with algorithm.kl_estimator = 'k2': its mean is not the divergence, and "
            "weighed with a gradient its gradient is not either; set kl_estimator to 'k3', or kl_importance to false"
        )
    if (
        resolved.correction in {"none", "m2po", "opsm"}
        and resolved.proximal == "recomputed"
        and staleness.max_staleness
    ):
        found.append(
            f"algorithm.proximal = 'recomputed' with algorithm.correction = {resolved.correction!r}: tokens of older "
            "weights are trained on as if they were new; set proximal to 'generator', or correction to 'tis'"
        )
    learns_alone = resolved.advantage in {"reinforce_pp", "none"} or resolved.process != "none"
    if generation.group_size == 1 and not learns_alone and not resolved.has_teacher:
        found.append(
            f"generation.group_size = 1: algorithm.advantage = {resolved.advantage!r} compares a completion with the "
            "others of its group, so nothing would be learnt; raise it, or set the advantage to 'reinforce_pp'"
        )
    return found
