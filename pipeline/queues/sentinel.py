"""Connections to whichever server the Sentinels call the primary.

In: a `SentinelUrl`. Out: a pool whose connections ask the Sentinels whenever they connect, so that after a failover
the same call goes to the new primary. That a primary is missing is an outage like any other.
"""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio.client import Redis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from pipeline.config.sentinel import SentinelUrl

_ANSWER_S = 2.0  # of one Sentinel, before the next is asked


class Sentinels(Sentinel):
    """Those of one URL. service: what they are asked for."""

    def __init__(self, url: SentinelUrl) -> None:
        security = {name: value for name, value in parse_url(url.server_url).items() if name.startswith("ssl_")}
        if url.server_url.startswith("rediss://"):
            security["ssl"] = True
        super().__init__(  # type: ignore[no-untyped-call]
            url.sentinels,
            sentinel_kwargs={
                "username": url.username,
                "password": url.password,
                "protocol": 2,
                "socket_timeout": _ANSWER_S,
                "socket_connect_timeout": _ANSWER_S,
                "retry": Retry(NoBackoff(), 0),
                **security,
            },
        )
        self.service = url.service

    @property
    def by_place(self) -> dict[str, Redis]:
        """A client of each, by host and port."""
        return {_place(sentinel): sentinel for sentinel in self.sentinels}

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the primary, by the first Sentinel that knows one that is up.

        Raises MasterNotFoundError, saying of each Sentinel why not, and AuthenticationError.
        """
        problems = []
        for sentinel in list(self.sentinels):
            try:
                state = (await services_of(sentinel)).get(service_name)
            except (AuthenticationError, AuthorizationError, NoPermissionError):
                raise
            except (RedisError, OSError) as error:
                problems.append(f"{_place(sentinel)} does not answer ({type(error).__name__})")
                continue
            if state is None:
                problems.append(f"{_place(sentinel)} knows no service {service_name!r}")
            elif not self.check_master_state(state, service_name):
                problems.append(f"{_place(sentinel)} says that the primary is down")
            else:
                self.sentinels.remove(sentinel)
                self.sentinels.insert(0, sentinel)
                return str(state["ip"]), int(state["port"])
        raise MasterNotFoundError("no Sentinel names a primary: " + "; ".join(problems))


class _ToPrimary(SentinelManagedConnection):
    """A connection that asks the Sentinels whenever it connects.

    redis-py's own asks them when it is taken from its pool, and not when it sends again what failed: then it
    tries the address of the dead primary until all retries are spent.
    """

    async def connect_to(self, address: tuple[str, int]) -> None:
        """Once."""
        self.host, self.port = address
        await super().connect_check_health(self.connection_pool.check_connection, retry_socket_connect=False)

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """As often as there are retries, each time to whoever is the primary then."""
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]


class _ToPrimaryEncrypted(_ToPrimary, SSLConnection):
    """The same over TLS."""


class PrimaryPool(SentinelConnectionPool):
    """Connections to the primary; ends those to the Sentinels, too."""

    def __init__(self, url: SentinelUrl, **connection: Any) -> None:
        options = {name: value for name, value in parse_url(url.server_url).items() if name not in {"host", "port"}}
        is_encrypted = options.pop("connection_class", None) is not None
        kind = _ToPrimaryEncrypted if is_encrypted else _ToPrimary
        words = {**connection, **options, "connection_class": kind}
        super().__init__(url.service, Sentinels(url), **words)  # type: ignore[no-untyped-call]

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """As of any pool."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


async def services_of(sentinel: Redis) -> dict[str, dict[str, Any]]:
    """What a Sentinel says of each primary that it watches, by the name of its service. Raises RedisError, OSError."""
    return cast(dict[str, dict[str, Any]], await sentinel.sentinel_masters())


def _place(sentinel: Redis) -> str:
    options = sentinel.connection_pool.connection_kwargs
    return f"{options['host']}:{options['port']}"
