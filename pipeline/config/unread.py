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
_ACTING = ("generator", "interpolated")


def unread(settings: AlgorithmSettings) -> list[str]:
    """Which changed settings do nothing. Those of a loss also need a ratio that is not 1 by construction."""
    resolved, found = settings.resolved, []
    for name, (choice, values) in _READ_WITH.items():
        value = getattr(settings, name)
        if value == AlgorithmSettings.model_fields[name].default:
            continue
        conditions = [(choice, values), *([("proximal", _ACTING)] if choice == "loss" else [])]
        unmet = [(what, of_it) for what, of_it in conditions if getattr(resolved, what) not in of_it]
        if unmet:
            what, of_it = unmet[0]
            chosen, wanted = _shown(getattr(resolved, what)), " or ".join(map(_shown, of_it))
            found.append(
                f"algorithm.{name} = {_shown(value)} does nothing with algorithm.{what} = {chosen}; set {what} to "
                f"{wanted}, or leave {name} out"
            )
    return found


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
