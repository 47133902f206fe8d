"""From what is written to one `Config`, and from a `Config` to what may be shown.

In: paths, environment, overrides; defaults < TOML files, left to right < environment < `--set`.
Out: a `Config`, or a ConfigError that lists every problem on a line of its own. What is shown,
stored with a run or said in an error never holds a secret.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.messages import Json
from pipeline.settings.problems import disagreements, mask_url, problems_of, server_name, unknown_setting
from pipeline.settings.reference import render_reference, schema, sections, setting_named, settings, to_toml
from pipeline.settings.sources import Layered, parse_value, read_toml, single_settings

__all__ = ["fingerprint", "load_config", "mask_url", "masked", "render_reference", "schema", "server_name", "show"]

_AGREED = (
    "run.seed",
    "run.topology",
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
    "generation.replay_routing",
    "staleness.",
    "algorithm.",
    "scoring.teacher_column",
)

# How long a trainer is patient changes nothing of what is learnt.
_OWN = frozenset({"algorithm.max_refill"})
_PATHS = ("model.path", "model.chat_template", "data.path", "data.eval_path")


def load_config(
    paths: Sequence[Path | str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """The settings of all sources. environ: the process's own by default; overrides: `section.key=value`.

    Raises ConfigError with one line for each problem.
    """
    written = Layered()
    problems: list[str] = []
    for path in paths:
        written.add(read_toml(Path(path)), str(path))
    for source, name, text in single_settings(os.environ if environ is None else environ, overrides):
        setting = setting_named(name)
        if setting is None:
            problems.append(unknown_setting(tuple(name.split(".")), source))
            continue
        written.set(name.split("."), parse_value(text, setting), source)
    try:
        config = Config.model_validate_json(json.dumps(written.values, default=str), strict=True)
    except ValidationError as error:
        problems += problems_of(error, written)
    else:
        problems += disagreements(config)
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
        keys = [setting.key for setting in settings().values() if setting.section == section]
        lines += ["", f"[{section}]", *(f"{key} = {to_toml(_at(values, f'{section}.{key}'))}" for key in keys)]
    return "\n".join(lines).lstrip() + "\n"


def fingerprint(config: Config) -> dict[str, str]:
    """What all workers of a run must agree on: dotted setting -> value as JSON. No host, port or device.

    Of paths only the last part counts: the same model may lie elsewhere on another machine.
    """
    values = masked(config)
    agreed = {
        path: json.dumps(_place_free(path, values), sort_keys=True)
        for path in settings()
        if path.startswith(_AGREED) and path not in _OWN
    }
    rewards = [[reward.function, reward.weight, reward.kwargs] for reward in config.scoring.rewards]
    teachers = [[teacher.title, Path(teacher.model).name, teacher.weight] for teacher in config.scoring.teachers]
    judges = [[judge.title, Path(judge.model).name, judge.weight] for judge in config.scoring.judges]
    scoring = {"rewards": rewards, "teachers": teachers, "judges": judges}
    return {**agreed, **{f"scoring.{name}": json.dumps(value, sort_keys=True) for name, value in scoring.items()}}


def _place_free(path: str, values: Mapping[str, Json]) -> Json:
    value = _at(values, path)
    return Path(value).name if path in _PATHS and isinstance(value, str) else value


def _at(values: Mapping[str, Json], path: str) -> Json:
    here: Json = dict(values)
    for part in path.split("."):
        here = here[part] if isinstance(here, dict) else None
    return here


def main() -> None:
    """Write the reference: `python -m pipeline.settings.files > config.toml`."""
    sys.stdout.write(render_reference())


if __name__ == "__main__":
    main()
