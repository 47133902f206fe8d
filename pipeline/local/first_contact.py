"""What is found out about a run's server before any worker starts.

In: settings with the server's real address. Out: nothing, or an error that a person can act on. It
feeds, claims and removes nothing; what it cannot judge (a server that is loading, or full) is left
to the workers, which wait.
"""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.errors import ServiceUnavailableError
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.queues.connection import connect, is_away, passes
from pipeline.settings.files import fingerprint, server_name, show

_PATIENCE_S, _RETRY_S = 4.0, 0.2


async def make_contact(config: Config, *, patience_s: float = _PATIENCE_S) -> None:
    """Reach the server and join the run.

    Raises ServiceUnavailableError when there is no server, RunConflictError when the run on it has
    other settings.
    """
    async with connect(config.redis, retries=0) as redis:
        await _reach(redis, config, patience_s)
        try:
            await Fleet(redis, Keys(config.run.name)).join(fingerprint(config), resolved=show(config))
        except RedisError:
            return  # it is there; the workers wait until it takes writes, or say that it never will


async def _reach(redis: Redis, config: Config, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            await redis.ping()
        except (RedisError, OSError) as error:
            if passes(error) or not (is_away(error) or isinstance(error, OSError)):
                return  # an answer, if not the one that was wanted
            if time.monotonic() > deadline:
                server, why = server_name(config.redis), str(error).rstrip(".")
                raise ServiceUnavailableError(
                    f"{server}: no server answers there ({why}). Start it, set redis.url or REDIS_URL to another, "
                    'or use redis.url = "embedded" for a private one'
                ) from None
            await asyncio.sleep(_RETRY_S)
        else:
            return
