"""How it is said that two parts of a run have different settings.

In: what both agree on or should, setting -> value as JSON. Out: one line for people. The values
themselves are made in `pipeline.settings.files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

_REWARDS = "scoring.rewards"


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
    if key != _REWARDS:
        return value
    return ", ".join(_reward(*reward) for reward in json.loads(value)) or "none"


def _reward(function: str, weight: float, kwargs: Mapping[str, object]) -> str:
    settings = ", ".join(f"{name}={json.dumps(value)}" for name, value in kwargs.items())
    return (f"{weight:g} x " if weight != 1 else "") + function + (f"({settings})" if settings else "")
