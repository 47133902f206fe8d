"""Where settings come from: defaults < TOML files, left to right < environment < --set.

In: paths, environment, overrides. Out: one `Config`, or a ConfigError that lists every problem on
a line of its own. What is shown, stored with a run or said in an error never holds a secret.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from pipeline.config import Config
from pipeline.config_problems import SettingPath, mask_url, nearest, problems_of
from pipeline.config_reference import Setting, render_reference, schema, sections, settings, to_toml
from pipeline.errors import ConfigError
from pipeline.keys import Keys
from pipeline.messages import Json

__all__ = ["fingerprint", "load_config", "mask_url", "masked", "render_reference", "schema", "show"]

_PREFIX = "ROLLSTREAM_"
_AGREED = (
    "run.seed",
    "model.path",
    "model.max_context",
    "model.chat_template",
    "lora.",
    "data.",
    "generation.engine",
    "generation.group_size",
    "generation.max_tokens",
    "generation.temperature",
    "generation.top_p",
    "generation.top_k",
    "generation.stop",
    "generation.replay_sampling_mask",
    "staleness.",
    "algorithm.",
)


def load_config(
    paths: Sequence[Path | str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """The settings of all sources. environ: the process's own by default; overrides: `section.key=value`.

    Raises ConfigError with one line for each problem.
    """
    merged: dict[str, Json] = {}
    sources: dict[SettingPath, str] = {}
    problems: list[str] = []
    for path in paths:
        _merge(merged, _read(Path(path)), str(path), sources)
    for source, name, text in _loose(os.environ if environ is None else environ, overrides):
        problems += _assign(merged, name, text, source, sources)
    try:
        config = Config.model_validate_json(json.dumps(merged, default=str), strict=True)
    except ValidationError as error:
        problems += problems_of(error, merged, sources)
    else:
        problems += _disagreements(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def masked(config: Config) -> dict[str, Json]:
    """All settings as JSON values, without secrets."""
    values: dict[str, Json] = config.model_dump(mode="json")
    redis = values["redis"]
    if isinstance(redis, dict):
        redis["url"] = mask_url(config.redis.url.get_secret_value())
    return values


def show(config: Config) -> str:
    """The resolved settings as TOML, without secrets."""
    values = masked(config)
    lines: list[str] = []
    for section in sections():
        table = _at(values, tuple(section.split(".")))
        if not isinstance(table, dict):
            continue
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {to_toml(value)}" for key, value in table.items() if f"{section}.{key}" in settings()]
    return "\n".join(lines).lstrip() + "\n"


def fingerprint(config: Config) -> dict[str, str]:
    """What all workers of a run must agree on: dotted setting -> value as JSON. No host, port or device."""
    values = masked(config)
    agreed = {
        path: json.dumps(_at(values, tuple(path.split("."))), sort_keys=True)
        for path in settings()
        if path.startswith(_AGREED)
    }
    rewards = [[reward.function, reward.weight, reward.kwargs] for reward in config.scoring.rewards]
    return {**agreed, "scoring.rewards": json.dumps(rewards, sort_keys=True)}


def _read(path: Path) -> dict[str, Json]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give an existing one with -c") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from None
    try:
        values: dict[str, Json] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return values


def _merge(
    into: dict[str, Json],
    values: Mapping[str, Json],
    source: str,
    sources: dict[SettingPath, str],
    path: SettingPath = (),
) -> None:
    """Tables merge key by key; everything else, lists too, is replaced."""
    for key, value in values.items():
        here = into.get(key)
        if isinstance(value, dict):
            table: dict[str, Json] = here if isinstance(here, dict) else {}
            into[key] = table
            _merge(table, value, source, sources, (*path, key))
            continue
        into[key] = value
        sources[(*path, key)] = source


def _loose(environ: Mapping[str, str], overrides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Settings written one by one: (source, dotted name, text), weakest first.

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


def _assign(into: dict[str, Json], name: str, text: str, source: str, sources: dict[SettingPath, str]) -> list[str]:
    path = tuple(name.split("."))
    setting = settings().get(name)
    if setting is None:
        return [f"unknown setting {name} ({source}): {nearest(path)}"]
    value = _parse(text, setting)
    for part in reversed(path):
        value = {part: value}
    if isinstance(value, dict):
        _merge(into, value, source, sources)
    return []


def _parse(text: str, setting: Setting) -> Json:
    """A TOML value, or the text itself. `run.name=7` and `tracking.trackers=a,b` need no quotes."""
    try:
        value: Json = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if setting.accepts_text and not isinstance(value, str):
        return text
    if setting.is_list_of_text and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _disagreements(config: Config) -> list[str]:
    """Settings that are right each for itself and not together."""
    problems: list[str] = []
    try:
        Keys(config.run.name)
    except ConfigError as error:
        problems.append(str(error))
    url = config.redis.url.get_secret_value()
    if url != "embedded" and not url.startswith(("redis://", "rediss://", "unix://")):
        problems.append(
            f'redis.url = "{mask_url(url)}": should be "embedded" or begin with redis://, rediss:// or unix://'
        )
    if config.admission_limit > config.queues.max_length:
        problems.append(
            f"queues.max_length = {config.queues.max_length}: (staleness.max_staleness + 1) x trainer.groups_per_step "
            f"= {config.admission_limit} groups may be live at once; set it to at least that"
        )
    if config.weights.port and config.weights.port == config.weights.announce_port:
        problems.append(f"weights.announce_port = {config.weights.port}: weights.port is the same; use two, or 0")
    if config.evaluation.every_steps and not config.data.eval_path:
        problems.append(
            f"evaluation.every_steps = {config.evaluation.every_steps}: data.eval_path is empty; "
            "name the held-out prompts there"
        )
    return problems


def _at(values: Mapping[str, Json], path: tuple[str, ...]) -> Json:
    here: Json = dict(values)
    for part in path:
        here = here[part] if isinstance(here, dict) else None
    return here


def main() -> None:
    """Write the reference: `python -m pipeline.config_files > config.toml`."""
    sys.stdout.write(render_reference())


if __name__ == "__main__":
    main()
