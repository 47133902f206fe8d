"""Settings that were changed although what was chosen does not look at them.

In: the settings of an algorithm. Out: one sentence for each, with the way out. Whoever sets a bound expects
it to hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.algorithm import AlgorithmSettings

_TRUNCATED = ("tis", "mis", "sequence_tis", "sequence_mis", "geometric_tis")

# Setting -> a choice, and the values of it with which the setting is read.
_READ_WITH: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "clip_low": ("loss", ("ppo_clip",)),
    "clip_high": ("loss", ("ppo_clip",)),
    "dual_clip": ("loss", ("ppo_clip",)),
    "gspo_clip_low": ("loss", ("gspo",)),
    "gspo_clip_high": ("loss", ("gspo",)),
    "cispo_max": ("loss", ("cispo",)),
    "sapo_tau_positive": ("loss", ("sapo",)),
    "sapo_tau_negative": ("loss", ("sapo",)),
    "gmpo_clip": ("loss", ("gmpo",)),
    "dppo_divergence": ("loss", ("dppo",)),
    "dppo_max": ("loss", ("dppo",)),
    "truncation": ("correction", _TRUNCATED),
    "band_low": ("correction", ("icepop",)),
    "band_high": ("correction", ("icepop",)),
    "geometric_band": ("correction", ("geometric_mis",)),
    "m2po_max": ("correction", ("m2po",)),
    "opsm_max": ("correction", ("opsm",)),
    "aggregation_length": ("aggregation", ("constant",)),
    "process_weight": ("process", ("returns", "align")),
    "overlong_buffer": ("overlong", (True,)),
    "overlong_penalty": ("overlong", (True,)),
}
# Setting -> the weight that must be above 0 for it to be read.
_WEIGHED_BY: Mapping[str, str] = {
    "kl_estimator": "kl_coef",
    "kl_in": "kl_coef",
    "kl_importance": "kl_coef",
    "jsd_beta": "jsd_coef",
}
_ACTING = ("generator", "interpolated")


def unread(settings: AlgorithmSettings) -> list[str]:
    """Which changed settings do nothing."""
    return [*_unchosen(settings), *_unweighed(settings), *_without_a_ratio(settings)]


def _unchosen(settings: AlgorithmSettings) -> list[str]:
    """What belongs to another choice. What is a loss's also needs a ratio that is not 1 by construction."""
    resolved, found = settings.resolved, []
    for name, (choice, values) in _READ_WITH.items():
        if not _is_changed(settings, name):
            continue
        conditions = [(choice, values), *([("proximal", _ACTING)] if choice == "loss" else [])]
        unmet = [(what, of_it) for what, of_it in conditions if getattr(resolved, what) not in of_it]
        if unmet:
            what, of_it = unmet[0]
            chosen, wanted = _shown(getattr(resolved, what)), " or ".join(map(_shown, of_it))
            found.append(
                f"algorithm.{name} = {_shown(getattr(settings, name))} does nothing with algorithm.{what} = {chosen}; "
                f"set {what} to {wanted}, or leave {name} out"
            )
    return found


def _unweighed(settings: AlgorithmSettings) -> list[str]:
    return [
        f"algorithm.{name} = {_shown(getattr(settings, name))} does nothing with algorithm.{weight} = 0; set {weight} "
        f"above 0, or leave {name} out"
        for name, weight in _WEIGHED_BY.items()
        if _is_changed(settings, name) and not getattr(settings, weight)
    ]


def _without_a_ratio(settings: AlgorithmSettings) -> list[str]:
    """A loss that differs from the plain policy gradient, which ppo_clip then is, by its ratio alone."""
    resolved = settings.resolved
    if resolved.loss in {"", "ppo_clip"} or resolved.proximal in _ACTING:
        return []
    return [
        f"algorithm.loss = {resolved.loss!r} does nothing of its own with algorithm.proximal = 'recomputed' and "
        f"algorithm.correction = {resolved.correction!r}: the ratio is 1 at the one update of each batch, and every "
        "loss the plain policy gradient; set correction to 'none' and proximal to 'generator', or correction to 'tis' "
        "and proximal to 'interpolated'"
    ]


def _is_changed(settings: AlgorithmSettings, name: str) -> bool:
    return bool(getattr(settings, name) != AlgorithmSettings.model_fields[name].default)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
