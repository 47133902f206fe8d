"""Parts of an algorithm that cancel each other, or leave nothing to learn from.

In: the settings of an algorithm. Out: one sentence for each conflict, with the reason and the way
out. Every process can ask, without torch, before anything is started.
"""

from __future__ import annotations

from pipeline.config.algorithm import WEIGHTING, AlgorithmSettings


def conflicts(settings: AlgorithmSettings) -> list[str]:
    """Why these settings cannot be used together; empty where they can."""
    resolved = settings.resolved
    found = []
    if resolved.correction in WEIGHTING and resolved.proximal == "generator":
        found.append(
            f"algorithm.correction = {resolved.correction!r} with algorithm.proximal = 'generator' counts the same "
            "ratio twice, once as the weight and once in the loss; set algorithm.proximal to 'recomputed' or "
            "'interpolated', or algorithm.correction to 'none', 'm2po' or 'opsm'"
        )
    if resolved.correction not in WEIGHTING and resolved.proximal == "interpolated":
        found.append(
            f"algorithm.proximal = 'interpolated' with algorithm.correction = {resolved.correction!r} leaves the part "
            "between the generator and the interpolated policy uncorrected; set algorithm.correction to 'tis' or "
            "another that weighs tokens, or algorithm.proximal to 'generator'"
        )
    if resolved.kl_importance and resolved.kl_in == "reward":
        found.append(
            "algorithm.kl_importance = true with algorithm.kl_in = 'reward': a KL term in the reward is weighed with "
            "its completion already; set one of them to false or 'loss'"
        )
    if 0 < resolved.dual_clip <= 1:
        found.append(
            f"algorithm.dual_clip = {resolved.dual_clip:g} would end the gradient of every token with a negative "
            "advantage; set it above 1, 3 is usual, or to 0 for none"
        )
    if resolved.advantage == "none" and not resolved.has_teacher:
        found.append(
            "algorithm.advantage = 'none' with algorithm.distillation_coef = 0 leaves nothing to learn; raise "
            "distillation_coef or jsd_coef, or set the advantage to 'group_mean_std'"
        )
    if resolved.advantage == "none" and resolved.kl_coef and resolved.kl_in == "reward":
        found.append(
            "algorithm.kl_in = 'reward' with algorithm.advantage = 'none', which looks at no reward; set kl_in to "
            "'loss'"
        )
    if resolved.band_low > resolved.band_high:
        found.append(
            f"algorithm.band_low = {resolved.band_low:g} is above algorithm.band_high = {resolved.band_high:g}: "
            "icepop would mask every token; set it below"
        )
    lowest, highest = resolved.group_reward_range
    if lowest > highest:
        found.append(
            f"algorithm.min_group_reward = {lowest:g} is above algorithm.max_group_reward = {highest:g}: every group "
            'would be dropped; set it below, or set one of them to "off"'
        )
    return found
