"""A `redis.url` that names Sentinels instead of a server.

In: `redis+sentinel://user:password@host:port,host:port/service/db?...`. Out: where the Sentinels are, what they call
the primary, and how to enter it. No part of a URL appears in an error, for it may hold a password.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_PORT = 26379
SHAPE = "redis+sentinel://host:port,host:port,host:port/service/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelUrl:
    """sentinels: host and port of each. service: what they call the primary.

    server_url: with what one connects to the primary, but for its host and port. username, password: of the
    Sentinels themselves, where they ask for one.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    server_url: str
    username: str | None
    password: str | None

    @staticmethod
    def is_one(url: str) -> bool:
        """Whether it is meant to be one."""
        return url.partition("://")[0] in _SCHEMES

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Raises ValueError, which says what is wrong and how it should look."""
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        authority, _, path = place.partition("/")
        user, at, hosts = authority.rpartition("@")
        service, *databases = path.strip("/").split("/")
        if scheme not in _SCHEMES or not service or len(databases) > 1:
            raise ValueError(f"behind the Sentinels should be the name of their service, as in {SHAPE}")
        options = dict(parse_qsl(query, keep_blank_values=True))
        username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
        words = f"?{urlencode(options)}" if options else ""
        return cls(
            sentinels=tuple(_place(host) for host in hosts.split(",")),
            service=unquote(service),
            server_url=f"{_SCHEMES[scheme]}://{user}{at}{service}/{databases[0] if databases else 0}{words}",
            username=username,
            password=password,
        )


def _place(host: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{host}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name:
        raise ValueError(f"each Sentinel should be host:port, separated by commas, as in {SHAPE}")
    return name, port or _PORT
