"""Settings as they are written down: TOML files, environment variables, `--set` flags.

In: files and text. Out: one merged table and, for every value, where it was written. It judges
only form; whether a value is allowed is the models' business.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.errors import ConfigError
from pipeline.messages import Json
from pipeline.settings.reference import Setting, settings

SettingPath: TypeAlias = tuple[str | int, ...]
_PREFIX = "ROLLSTREAM_"


@dataclass(slots=True)
class Layered:
    """Settings of all sources so far, later ones on top.

    values: nested tables. sources: path of a value -> file, variable or flag that set it.
    """

    values: dict[str, Json] = field(default_factory=dict)
    sources: dict[SettingPath, str] = field(default_factory=dict)

    def add(self, values: Mapping[str, Json], source: str) -> None:
        """Tables merge key by key; everything else, lists too, is replaced."""
        self._merge(self.values, values, source, ())

    def set(self, path: Sequence[str], value: Json, source: str) -> None:
        """One value."""
        for part in reversed(path):
            value = {part: value}
        if isinstance(value, dict):
            self.add(value, source)

    def at(self, path: SettingPath) -> Json:
        """The value at a path that exists."""
        here: Any = self.values
        for part in path:
            here = here[part]
        value: Json = here
        return value

    def existing(self, path: SettingPath) -> SettingPath:
        """The longest beginning of a path that exists."""
        here: Any = self.values
        for length, part in enumerate(path):
            in_table = isinstance(here, dict) and part in here
            in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
            if not in_table and not in_list:
                return path[:length]
            here = here[part]
        return path

    def source_of(self, path: SettingPath) -> str:
        """Where a value was written: its own source, that of the list around it, or of what is inside it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.sources:
                return self.sources[path[:length]]
        return next((source for known, source in self.sources.items() if known[: len(path)] == path), "")

    def _merge(self, into: dict[str, Json], values: Mapping[str, Json], source: str, path: SettingPath) -> None:
        for key, value in values.items():
            here = (*path, key)
            if isinstance(value, dict):
                below = into.get(key)
                table: dict[str, Json] = below if isinstance(below, dict) else {}
                into[key] = table
                self._merge(table, value, source, here)
                continue
            into[key] = value
            self.sources[here] = source


def read_toml(path: Path) -> dict[str, Json]:
    """A TOML file. Raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give an existing one with -c") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        values: dict[str, Json] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers and nesting have bounds of their own
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return values


def single_settings(environ: Mapping[str, str], overrides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Settings written one by one, weakest first: (source, dotted name, text).

    A variable without a double underscore is not a setting: Kubernetes makes ROLLSTREAM_PORT and
    the like for every service of that name.
    """
    if environ.get("REDIS_URL"):
        yield "environment REDIS_URL", "redis.url", environ["REDIS_URL"]
    for variable in sorted(environ):
        name = variable.removeprefix(_PREFIX)
        if name != variable and "__" in name:
            yield f"environment {variable}", name.lower().replace("__", "."), environ[variable]
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: write it as section.key=value")
        yield f"--set {name}", name.strip(), text.strip()


def near_misses(environ: Mapping[str, str]) -> list[str]:
    """Variables that would be settings with a double underscore, and so are not read."""
    variables = {f"{_PREFIX}{path.upper().replace('.', '_')}": path for path in settings()}
    return [
        f"environment {name} is not read: write {_PREFIX}{variables[name].upper().replace('.', '__')}"
        for name in sorted(environ)
        if name in variables and not environ[name].startswith("tcp://")  # Kubernetes gives services such values
    ]


def parse_value(text: str, setting: Setting) -> Json:
    """A TOML value, or the text itself. `run.name=7` and `tracking.trackers=a,b` need no quotes."""
    try:
        value: Json = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    if setting.accepts_text and not isinstance(value, str):
        return text
    if setting.is_list_of_text and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value
