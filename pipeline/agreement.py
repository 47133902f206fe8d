"""How it is said that two parts of a run have different settings.

In: what both agree on or should, setting -> value as JSON. Out: one line for people. The values
themselves are made in `pipeline.settings.files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

_REWARDS, _MODELS = "scoring.rewards", ("scoring.teachers", "scoring.judges")


def differences(here: Mapping[str, str], there: Mapping[str, str], place: str) -> str:
    """Every setting that differs, with both values; empty where none does. place: as in "in the run"."""
    return "; ".join(
        f"{key} = {_readable(key, value)} here, {_readable(key, there.get(key))} {place}"
        for key, value in here.items()
        if there.get(key) != value
    )


def _readable(key: str, value: str | None) -> str:
    if value is None:
        return "nothing"
    if key in _MODELS:
        return ", ".join(_model(*model) for model in json.loads(value)) or "none"
    if key == _REWARDS:
        return ", ".join(_reward(*reward) for reward in json.loads(value)) or "none"
    return value


def _reward(function: str, weight: float, kwargs: Mapping[str, object]) -> str:
    settings = ", ".join(f"{name}={json.dumps(value)}" for name, value in kwargs.items())
    return _weighted(weight, function) + (f"({settings})" if settings else "")


def _model(title: str, model: str, weight: float) -> str:
    return _weighted(weight, title) + (f" ({model})" if model not in {"", title} else "")


def _weighted(weight: float, what: str) -> str:
    return f"{weight:g} x {what}" if weight != 1 else what
