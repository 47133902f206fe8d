"""Sentences about what is wrong in a configuration.

In: merged settings, where each came from, and pydantic's errors. Out: one line for each problem
with the setting, its value, what was expected and the way out. No secret appears in a line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.config import EMBEDDED, Config, JudgeSettings, RedisSettings, RewardSettings, Section, TeacherSettings
from pipeline.config.conflicts import conflicts
from pipeline.config.scoring_conflicts import scoring_conflicts
from pipeline.config.sentinel import SHAPE, SentinelUrl
from pipeline.errors import ConfigError
from pipeline.keys import Keys
from pipeline.messages import Json
from pipeline.settings.reference import plain_default, sections, settings, to_toml
from pipeline.settings.sources import Layered, SettingPath

_VLLM_TEMPERATURES = (0.01, 2.0)
_LISTS: dict[str, type[Section]] = {
    "scoring.rewards": RewardSettings,
    "scoring.teachers": TeacherSettings,
    "scoring.judges": JudgeSettings,
}
_PASSWORD = re.compile(r"(?P<before>//[^:/?#\s]*:).*(?P<after>@)|(?P<key>[?&](?:sentinel_)?password=)[^&\s]*")


def mask_url(url: str) -> str:
    """The URL with its password replaced by three stars."""
    return _PASSWORD.sub(lambda match: f"{match['before']}***@" if match["before"] else f"{match['key']}***", url)


def server_name(redis: RedisSettings) -> str:
    """The server as messages name it: `redis.url = redis://user:***@host:6379/0`."""
    return f"redis.url = {mask_url(redis.url.get_secret_value())}"


def problems_of(error: ValidationError, written: Layered) -> list[str]:
    """One line for each problem, in data-flow order, without repetitions.

    pydantic adds the branches of a union to a location; only what is really written is named.
    """
    lines: dict[SettingPath, str] = {}
    for detail in error.errors(include_url=False):
        path = detail["loc"] if detail["type"] == "missing" else written.existing(detail["loc"])
        lines.setdefault(path, _sentence(detail, path, written))
    return list(lines.values())


def unknown_setting(path: SettingPath, source: str) -> str:
    """An unknown name, where it stands, and the known one that was probably meant."""
    origin = f" ({source})" if source else ""
    guesses = _nearest([str(part) for part in path if not isinstance(part, int)])
    way_out = f"did you mean {guesses[0]}?" if guesses else "`rollstream config show --reference` lists all"
    return f"unknown setting {_dotted(path)}{origin}: {way_out}"


def disagreements(config: Config) -> list[str]:
    """Settings that are right each for itself and not together."""
    problems: list[str] = []
    try:
        Keys(config.run.name)
    except ConfigError as error:
        problems.append(str(error))
    url = config.redis.url.get_secret_value()
    problems += [f'redis.url = "{mask_url(url)}": {problem}' for problem in _url_problems(url)]
    if config.admission_limit > config.queues.max_length:
        problems.append(
            f"queues.max_length = {config.queues.max_length}: (staleness.max_staleness + 1) x trainer.groups_per_step "
            f"= {config.admission_limit} groups may be live at once; set it to at least that"
        )
    if 2 * config.worker.heartbeat_s > config.queues.lease_s:
        problems.append(
            f"worker.heartbeat_s = {config.worker.heartbeat_s:g}: the trainer's lock lasts queues.lease_s = "
            f"{config.queues.lease_s:g} and is renewed with each heartbeat; set it to at most half of that"
        )
    if config.staleness.max_staleness == 0 and config.weights.publish_every > 1:
        problems.append(
            f"weights.publish_every = {config.weights.publish_every}: with staleness.max_staleness = 0 every step "
            "must be published, or steps between would train on older samples; set it to 1"
        )
    if config.weights.port and config.weights.port == config.weights.announce_port:
        problems.append(f"weights.announce_port = {config.weights.port}: weights.port is the same; use two, or 0")
    if config.weights.store and config.weights.relay:
        problems.append(
            f"weights.relay = true: with weights.store = {config.weights.store!r} every machine reads the store "
            "itself; set it to false"
        )
    if config.autoscale.enabled and config.autoscale.max_generators > 1 and _has_one_generator(config):
        problems.append(
            f"autoscale.max_generators = {config.autoscale.max_generators}: {_has_one_generator(config)}; set it to 1"
        )
    found = problems + _data_problems(config) + conflicts(config.algorithm)
    return found + scoring_conflicts(config) + _engine_problems(config)


def _data_problems(config: Config) -> list[str]:
    problems = []
    if config.evaluation.every_steps and not config.data.eval_path:
        problems.append(
            f"evaluation.every_steps = {config.evaluation.every_steps}: data.eval_path is empty; "
            "name the held-out prompts there"
        )
    if config.generation.group_size == 1 and config.algorithm.resolved.drop_zero_variance:
        problems.append(
            "generation.group_size = 1 with algorithm.drop_zero_variance = true (the default of preset dapo): "
            "rewards of a group of one are always equal, so every group would be dropped; raise group_size, or set "
            "drop_zero_variance to false"
        )
    if config.data.curriculum and not config.data.shuffle:
        problems.append(
            "data.curriculum = true with data.shuffle = false: a curriculum draws its prompts at random; "
            "set data.shuffle to true"
        )
    if config.data.curriculum and config.data.epochs == 1:
        problems.append(
            "data.curriculum = true with data.epochs = 1: the first pass has every prompt once, and the curriculum "
            "begins behind it; set data.epochs to 0 with trainer.max_steps, or to 2 or more"
        )
    return problems


def _has_one_generator(config: Config) -> str:
    """Why more generators would only wait for each other; empty where they would not."""
    if config.is_colocated:
        return 'with run.topology = "colocated" generators take turns on one device'
    if config.generation.engine == "openai":
        return 'with generation.engine = "openai" one generator has the servers for itself'
    return ""


def _engine_problems(config: Config) -> list[str]:
    engine = config.generation.engine
    if config.is_colocated and engine in {"scripted", "openai"}:
        return [
            f'run.topology = "colocated": generation.engine = "{engine}" has no device of this machine to give up; '
            'set it to "transformers" or "vllm", or run.topology = "disaggregated"'
        ]
    if config.is_colocated and config.generation.device != config.trainer.device:
        return [
            f'run.topology = "colocated": generation.device = "{config.generation.device}" and trainer.device = '
            f'"{config.trainer.device}" are not one device; make them equal, or set run.topology = "disaggregated"'
        ]
    if config.generation.replay_routing and engine in {"scripted", "openai"}:
        return [
            f'generation.replay_routing = true: generation.engine = "{engine}" tells no experts; set it to false, '
            'or generation.engine = "transformers" or "vllm"'
        ]
    return _vllm_temperatures(config) if engine in {"vllm", "openai"} else []


def _vllm_temperatures(config: Config) -> list[str]:
    """vLLM refuses every request above its range, and draws at its lowest below without a word."""
    lowest, highest = _VLLM_TEMPERATURES
    chosen = {"generation": config.generation.temperature, "evaluation": config.evaluation.temperature}
    return [
        f"{section}.temperature = {value:g}: vLLM samples between {lowest:g} and {highest:g}; "
        'set it inside, or generation.engine = "transformers"'
        for section, value in chosen.items()
        if value and not lowest <= value <= highest
    ]


def _url_problems(url: str) -> list[str]:
    """redis-py takes database 0 where it cannot read the number, and so would use another than was meant."""
    if url == EMBEDDED:
        return []
    if SentinelUrl.is_one(url):
        try:
            url = SentinelUrl.parse(url).server_url
        except ValueError as error:
            return [str(error)]
    if not url.startswith(("redis://", "rediss://", "unix://")):
        return [f'should be "embedded" or begin with redis://, rediss:// or unix://, or look like {SHAPE}']
    return _database_problems(url)


def _database_problems(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return []  # refused when it is connected to; the reason may show a part of a password
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    databases = [*([path] if path else []), *parse_qs(parts.query).get("db", [])]
    if all(database.isascii() and database.isdigit() for database in databases):
        return []
    return ["what it names is not the number of a database: write /0 behind host and port, or nothing"]


def _nearest(names: list[str]) -> list[str]:
    """Candidates, best first: same section, same key elsewhere, initials (`lr`), a section, any key."""
    *outer, key = names
    section = ".".join(outer)
    if section in _LISTS:
        return _close(key, list(_LISTS[section].model_fields))
    known = list(settings().values())
    inside = [setting.key for setting in known if setting.section == section]
    return [
        *(setting.path for setting in known if setting.key == key),
        *(f"{section}.{near}" for near in _close(key, inside)),
        *(f"{section}.{name}" for name in inside if "".join(word[0] for word in name.split("_")) == key),
        *(f"[{near}]" for near in _close(".".join(names), sections()) if not inside),
        *(s.path for near in _close(key, [s.key for s in known]) for s in known if s.key == near),
    ]


def _sentence(detail: ErrorDetails, path: SettingPath, written: Layered) -> str:
    source = written.source_of(path)
    origin = f" ({source})" if source else ""
    if detail["type"] == "extra_forbidden":
        return unknown_setting(path, source)
    if detail["type"] == "missing":
        return f"{_dotted(path)} is missing{origin}: it has no default"
    reason = re.sub(r"^(Value error, |Input |String |Value )", "", detail["msg"])
    reason = reason.replace("a valid array", "a list").replace("an object", "a table")
    if not path:
        return reason
    return f"{_dotted(path)} = {_shown(path, written.at(path))}{origin}: {reason}{_way_out(path)}"


def _way_out(path: SettingPath) -> str:
    setting = settings().get(_dotted(path))
    if setting is None:
        return ""
    return f"; leave it out for the default, {to_toml(plain_default(setting.field))}"


def _shown(path: SettingPath, value: Json) -> str:
    setting = settings().get(_dotted(path))
    if setting is not None and setting.is_secret:
        return to_toml(mask_url(value)) if isinstance(value, str) else "***"
    text = to_toml(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _dotted(path: SettingPath) -> str:
    """`scoring.rewards[0].function`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _close(word: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, list(dict.fromkeys(known)), n=1, cutoff=0.65)
