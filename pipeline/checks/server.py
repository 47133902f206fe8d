"""The server of the settings: whether it answers, is new enough, keeps what it is given, and who stands in for it.

In: settings. Out: findings. It changes nothing, and shows no password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from pipeline.checks.findings import Finding, Level
from pipeline.config import Config, RedisSettings
from pipeline.config.sentinel import SentinelUrl
from pipeline.embedded import EmbeddedServer
from pipeline.errors import ConfigError, RollstreamError
from pipeline.local.server_address import find_server
from pipeline.queues.connection import connect, refusal
from pipeline.queues.sentinel import Sentinels, services_of
from pipeline.settings.files import mask_url

_SUBJECT = "redis"
_MIN_SERVER = (7, 0)
_PING_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """info: of INFO. fsync: of `appendfsync`. None where the server does not tell this user."""

    info: Mapping[str, Any] | None
    fsync: str | None


def examine_server(config: Config) -> list[Finding]:
    """The server of the settings; where it is to be embedded, a running one or a trial start."""
    url = config.redis.url.get_secret_value()
    with ExitStack() as stack:
        if config.redis.is_embedded:
            found = find_server(config.run_dir)
            try:
                url = found or stack.enter_context(EmbeddedServer.start()).url
            except RollstreamError as error:
                return [Finding(subject=_SUBJECT, level=Level.ERROR, text=str(error))]
            return _examine(config.redis, url, "embedded server", without_file=None)
        without_file = Level.ERROR if config.redis.must_persist else Level.HINT
        sentinels = list(_examine_sentinels(url)) if SentinelUrl.is_one(url) else []
        return [*_examine(config.redis, url, mask_url(url), without_file=without_file), *sentinels]


def _examine(settings: RedisSettings, url: str, name: str, *, without_file: Level | None) -> list[Finding]:
    """without_file: how bad it is that it keeps no append-only file."""
    try:
        answer = asyncio.run(_ask(settings, url))
    except (RedisError, OSError, ConfigError) as error:
        way_out = "start the server, or mend redis.url (REDIS_URL)"
        text = f"{name} does not answer: {_reason(error) if SentinelUrl.is_one(url) else type(error).__name__}"
        if isinstance(error, RedisError) and (why := refusal(error)):
            text, _, way_out = f"{name}: {why}".rpartition(": ")
        return [Finding(subject=_SUBJECT, level=Level.ERROR, text=text, way_out=way_out)]
    return list(_findings(answer, name, without_file))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _ask(settings: RedisSettings, url: str) -> _Answer:
    async with asyncio.timeout(_PING_TIMEOUT_S), connect(settings, url, retries=0) as client:
        await client.ping()
        try:
            info = await client.info()
        except NoPermissionError:
            return _Answer(None, None)
        try:
            fsync = str((await client.config_get("appendfsync"))["appendfsync"])
        except (RedisError, KeyError):
            fsync = None
        return _Answer(info, fsync)


def _findings(answer: _Answer, name: str, without_file: Level | None) -> Iterator[Finding]:
    info = answer.info
    if info is None:
        text = f"{name} answers; the users operator and exporter may ask, too, whether it keeps what it is told"
        yield Finding(subject=_SUBJECT, level=Level.OK, text=text)
        return
    kind = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    number = str(info.get("valkey_version") or info["redis_version"])
    yield Finding(subject=_SUBJECT, level=Level.OK, text=f"{name}: {kind} {number}")
    if tuple(int(part) for part in number.split(".")[:2]) < _MIN_SERVER:
        text, way_out = f"{kind} {number} is too old", "use Redis 7.0 or Valkey 7.2, or newer"
        yield Finding(subject=_SUBJECT, level=Level.ERROR, text=text, way_out=way_out)
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        text = f"maxmemory-policy = {info['maxmemory_policy']}: a full server would throw queues away"
        yield Finding(subject=_SUBJECT, level=Level.ERROR, text=text, way_out="set maxmemory-policy noeviction")
    if without_file is not None and not info.get("aof_enabled"):
        text = "appendonly is off: what is queued is lost when the server restarts"
        way_out = "CONFIG SET appendonly yes, and the same in its configuration"
        yield Finding(subject=_SUBJECT, level=without_file, text=text, way_out=way_out)
    elif without_file is Level.ERROR and answer.fsync not in {"always", None}:
        text = f"appendfsync = {answer.fsync}: what was answered just before the server's machine goes down is undone"
        yield Finding(subject=_SUBJECT, level=Level.HINT, text=text, way_out="set appendfsync always")


def _examine_sentinels(url: str) -> Iterator[Finding]:
    """Whether another server could take over now: nothing here stops a run that has its primary."""
    try:
        answers = asyncio.run(_ask_sentinels(SentinelUrl.parse(url)))
    except ValueError:
        return  # already said of the server
    for place, problem in answers.items():
        if problem:
            text, way_out = f"Sentinel {place}: {problem}", "mend it, or nobody may take over when the primary fails"
            yield Finding(subject="sentinel", level=Level.HINT, text=text, way_out=way_out)
        else:
            yield Finding(subject="sentinel", level=Level.OK, text=f"{place}: another server could take over")


async def _ask_sentinels(url: SentinelUrl) -> dict[str, str]:
    """Host and port of each, and what would keep a replica from taking over, or nothing."""
    sentinels = Sentinels(url)
    try:
        places = sentinels.by_place
        problems = await asyncio.gather(*(_problem_of(client, url.service) for client in places.values()))
        return dict(zip(places, problems, strict=True))
    finally:
        await sentinels.aclose()


async def _problem_of(sentinel: Redis, service: str) -> str:
    try:
        services = await services_of(sentinel)
        if service not in services:
            return f"it knows no service {service!r}" + (f", but {', '.join(sorted(services))}" if services else "")
        replicas = await sentinel.sentinel_slaves(service)
        if not [found for found in replicas if not (found["is_sdown"] or found["is_odown"])]:
            return f"it knows no replica of {service!r} that is up"
        await cast(Any, sentinel).execute_command("SENTINEL", "CKQUORUM", service)
    except ResponseError as error:
        return str(error)
    except (RedisError, OSError) as error:
        return f"it does not answer ({type(error).__name__})"
    return ""
