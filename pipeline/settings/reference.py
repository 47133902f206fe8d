"""The table of all settings, and what is rendered from it: `config.toml` and the JSON schema.

In: the models of `pipeline.config`. Out: text. It must never hold a setting's name or default of
its own, so that the reference cannot differ from the code.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from pipeline.config import Config
from pipeline.messages import Json

_HEADER = """\
# Every setting of rollstream with its default, in the order in which a rollout meets them.
# Rendered by `rollstream config show --reference`; copy what you change, leave out the rest.
#
# Later wins: these defaults < files given with -c, left to right < environment < --set.
# Environment: ROLLSTREAM_STALENESS__MAX_STALENESS=4, and REDIS_URL for redis.url.
# Command line: --set staleness.max_staleness=4
# Relative paths are meant from the directory in which a worker is started.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. section: dotted, as in `[generation.scripted]`. path: dotted, with the key."""

    section: str
    key: str
    field: FieldInfo

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def accepts_text(self) -> bool:
        """Whether a bare word on the command line is meant as it stands."""
        kind = self.field.annotation
        if get_origin(kind) is Literal:
            return all(isinstance(choice, str) for choice in get_args(kind))
        return kind in (str, Path, SecretStr)

    @property
    def is_list_of_text(self) -> bool:
        """Whether `a,b` on the command line is meant as a list."""
        kind = self.field.annotation
        return get_origin(kind) is list and not _section_of_list(self.field)

    @property
    def is_free_table(self) -> bool:
        """Whether its value is a table of any keys."""
        return get_origin(self.field.annotation) is dict

    @property
    def is_secret(self) -> bool:
        return self.field.annotation is SecretStr


def settings() -> dict[str, Setting]:
    """Every setting that stands in a table of its own, by dotted path, in data-flow order."""
    return {setting.path: setting for setting in _settings_of(Config, "")}


def setting_named(name: str) -> Setting | None:
    """The setting of that dotted name; of a table whose keys are free, as [generation.vllm], also any key in it."""
    known = settings()
    table, _, key = name.rpartition(".")
    outer = known.get(table)
    if name not in known and key and outer is not None and outer.is_free_table:
        return Setting(section=table, key=key, field=FieldInfo())
    return known.get(name)


def sections() -> list[str]:
    """Dotted names of the tables, in data-flow order."""
    return list(dict.fromkeys(setting.section for setting in settings().values()))


def render_reference() -> str:
    """`config.toml`: each setting, its default, one line of why."""
    return _HEADER + "".join(_render_section(model, name) for name, model in _tables(Config, ""))


def schema() -> dict[str, Json]:
    """JSON schema of the configuration, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def to_toml(value: Json) -> str:
    """A value as TOML. A JSON string is a TOML basic string too, once DEL is escaped."""
    if isinstance(value, list):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 100_000:
        return f"{value:_}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def plain_default(field: FieldInfo) -> Json:
    """A setting's default as a JSON value."""
    default: Any = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, SecretStr):
        return default.get_secret_value()
    if isinstance(default, Path):
        return str(default)
    plain: Json = default
    return plain


def _tables(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in model.model_fields.items():
        section = _section_model(field)
        if section is not None:
            yield prefix + key, section
            yield from _tables(section, f"{prefix}{key}.")


def _settings_of(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, section in _tables(model, prefix):
        for key, field in section.model_fields.items():
            if _section_model(field) is None:
                yield Setting(section=name, key=key, field=field)


def _section_model(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _section_of_list(field: FieldInfo) -> type[BaseModel] | None:
    kinds = get_args(field.annotation) if get_origin(field.annotation) is list else ()
    return kinds[0] if kinds and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel) else None


def _render_section(model: type[BaseModel], name: str) -> str:
    summary = " ".join((model.__doc__ or "").split())
    lines = ["", "", *_comment(summary), f"[{name}]"]
    tables: list[str] = []
    for key, field in model.model_fields.items():
        element = _section_of_list(field)
        if element is not None:
            tables += _render_example(element, f"{name}.{key}", field)
        elif _section_model(field) is None:
            lines += [*_comment(_why(field)), f"{key} = {to_toml(plain_default(field))}"]
    return "\n".join(lines + tables) + "\n"


def _render_example(model: type[BaseModel], name: str, field: FieldInfo) -> list[str]:
    """An array of tables is empty by default, so it is shown in comments, after the section's own keys."""
    lines = ["", *_comment(f"{field.description} None by default; one such table for each:"), f"# [[{name}]]"]
    for key, inner in model.model_fields.items():
        value = "exact_match" if inner.is_required() else plain_default(inner)
        lines += [*_comment(_why(inner), indent="#   # "), f"#   {key} = {to_toml(value)}"]
    return lines


def _why(field: FieldInfo) -> str:
    """The description, with the choices where it does not name them all."""
    text = field.description or ""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if all(str(choice) in text for choice in choices):
        return text
    return f"{text} One of: {', '.join(map(str, choices))}."


def _comment(text: str, indent: str = "# ") -> list[str]:
    return textwrap.wrap(text, width=110, initial_indent=indent, subsequent_indent=indent)
