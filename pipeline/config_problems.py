"""Sentences about what is wrong in a configuration.

In: merged settings, where each came from, and pydantic's errors. Out: one line for each problem
with the setting, its value, what was expected and the way out. No secret appears in a line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.config import RewardSettings
from pipeline.config_reference import plain_default, sections, settings, to_toml
from pipeline.messages import Json

SettingPath = tuple[str | int, ...]
_PASSWORD = re.compile(r"(?P<before>//[^:/?#\s]*:).*(?P<after>@)|(?P<key>[?&]password=)[^&\s]*")


def mask_url(url: str) -> str:
    """The URL with its password replaced by three stars."""
    return _PASSWORD.sub(lambda match: f"{match['before']}***@" if match["before"] else f"{match['key']}***", url)


def problems_of(error: ValidationError, values: Mapping[str, Json], sources: Mapping[SettingPath, str]) -> list[str]:
    """One line for each problem, in data-flow order, without repetitions."""
    lines: dict[SettingPath, str] = {}
    for detail in error.errors(include_url=False):
        path = _existing(detail["loc"], values) if detail["type"] != "missing" else detail["loc"]
        lines.setdefault(path, _sentence(detail, path, values, sources))
    return list(lines.values())


def nearest(path: SettingPath) -> str:
    """The known setting or section that an unknown one was probably meant to be, as a question."""
    *outer, key = (str(part) for part in path if not isinstance(part, int))
    section = ".".join(outer)
    if section == "scoring.rewards":
        return _question(_close(key, list(RewardSettings.model_fields)))
    known = list(settings().values())
    inside = [setting.key for setting in known if setting.section == section]
    candidates = [
        *(f"{section}.{near}" for near in _close(key, inside)),
        *(setting.path for setting in known if setting.key == key),
        *(f"{section}.{name}" for name in inside if "".join(word[0] for word in name.split("_")) == key),
        *(f"[{near}]" for near in _close(f"{section}.{key}".lstrip("."), sections())),
        *(s.path for near in _close(key, [s.key for s in known]) for s in known if s.key == near),
    ]
    return _question(candidates)


def dotted(path: SettingPath) -> str:
    """`scoring.rewards[0].function`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def source_of(path: SettingPath, sources: Mapping[SettingPath, str]) -> str:
    """Where a setting, or the closest table or list around it, was written."""
    for length in range(len(path), 0, -1):
        if path[:length] in sources:
            return sources[path[:length]]
    inside = (source for known, source in sources.items() if known[: len(path)] == path)
    return next(inside, "")


def _sentence(
    detail: ErrorDetails, path: SettingPath, values: Mapping[str, Json], sources: Mapping[SettingPath, str]
) -> str:
    origin = source_of(path, sources)
    where = f" ({origin})" if origin else ""
    if detail["type"] == "extra_forbidden":
        return f"unknown setting {dotted(path)}{where}: {nearest(path)}"
    if detail["type"] == "missing":
        return f"{dotted(path)} is missing{where}: it has no default"
    reason = re.sub(r"^(Value error, |Input |String |Value )", "", detail["msg"])
    reason = reason.replace("a valid array", "a list").replace("an object", "a table")
    if not path:
        return reason
    return f"{dotted(path)} = {_shown(path, _value_at(path, values))}{where}: {reason}{_way_out(path)}"


def _way_out(path: SettingPath) -> str:
    setting = settings().get(dotted(path))
    if setting is None:
        return ""
    return f"; leave it out for the default, {to_toml(plain_default(setting.field))}"


def _shown(path: SettingPath, value: Json) -> str:
    setting = settings().get(dotted(path))
    if setting is not None and setting.is_secret:
        return to_toml(mask_url(value)) if isinstance(value, str) else "***"
    text = to_toml(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _existing(loc: Sequence[str | int], values: Mapping[str, Json]) -> SettingPath:
    """pydantic adds the branches of a union to the location; keep what is really in the settings."""
    path: list[str | int] = []
    here: Any = values
    for part in loc:
        in_table = isinstance(here, dict) and part in here
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if not in_table and not in_list:
            break
        here = here[part]
        path.append(part)
    return tuple(path)


def _value_at(path: SettingPath, values: Mapping[str, Json]) -> Json:
    here: Any = values
    for part in path:
        here = here[part]
    value: Json = here
    return value


def _close(word: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, list(dict.fromkeys(known)), n=1, cutoff=0.65)


def _question(candidates: Sequence[str]) -> str:
    return f"did you mean {candidates[0]}?" if candidates else "`rollstream config show --reference` lists all"
