"""The connection to Redis, and the Lua scripts that are called over it.

In: settings and a URL. Out: a client that reconnects by itself, and scripts by name. No password
ever appears in an error that is raised here.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any, TypeVar, cast

import msgpack
import structlog
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import TimeoutError as TooLate

from pipeline.config import EMBEDDED, RedisSettings
from pipeline.config.sentinel import SHAPE, SentinelUrl
from pipeline.errors import ConfigError, TrainerReplacedError
from pipeline.keys import CONSUMER_GROUP, Keys
from pipeline.queues.foreign import refuse_foreign_types
from pipeline.queues.sentinel import PrimaryPool

_Result = TypeVar("_Result")

# redis-py tries again for about a minute; longer outages are waited for in `until_accepted`.
_RETRIES = 64
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.02, 1.0
_CONNECT_TIMEOUT_S = 5.0
_READ_BYTES = 1024 * 1024
_REFUSED_WAIT_S, _SAY_EVERY_S = 0.5, 5.0
_log = structlog.get_logger()
_COPY_BYTES = 16 * 1024
# Blocking reads end well before the socket gives up on them.
MAX_BLOCK_S = 5.0
_MIN_SOCKET_TIMEOUT_S = 2 * MAX_BLOCK_S


class _Patient(Redis):
    """A worker's client: what its server refuses for a while is repeated until it is accepted."""


def connect(settings: RedisSettings, url: str | None = None, *, retries: int = _RETRIES) -> Redis:
    """A client for `url`, or for the one in the settings. retries: 0 fails at the first error or refusal.

    RESP2 on purpose: its replies have one shape in every redis-py and on every server; RESP3, the
    default, turns those of stream reads into maps. Raises ConfigError for a URL that cannot be one.
    """
    target = settings.url.get_secret_value() if url is None else url
    if target == EMBEDDED:
        raise ConfigError(
            'redis.url = "embedded" is for `rollstream up` and `rollstream demo`, which start the server. '
            "A worker on its own needs the server's URL: set REDIS_URL or redis.url, for example redis://host:6379"
        )
    options = {
        "protocol": 2,
        "decode_responses": False,
        "retry": Retry(ExponentialWithJitterBackoff(cap=_LONGEST_BACKOFF_S, base=_FIRST_BACKOFF_S), retries),
        "socket_timeout": max(settings.socket_timeout_s, _MIN_SOCKET_TIMEOUT_S),
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_read_size": _READ_BYTES,
    }
    kind = _Patient if retries else Redis
    try:
        if SentinelUrl.is_one(target):
            client = kind.from_pool(PrimaryPool(SentinelUrl.parse(target), **options))
        else:
            client = kind.from_url(target, **cast(Any, options))
        pool = client.connection_pool
        pool.connection_class = type("WorkerConnection", (_WorkerConnection, pool.connection_class), {})
        cast(Any, pool).make_connection()  # a word in the URL that no connection knows shows here
    except (ValueError, TypeError):
        scheme = target.partition("://")[0] if "://" in target else ""
        raise ConfigError(
            f"redis.url (scheme {scheme!r}, the rest is not shown) is not a Redis URL: "
            "use redis://, rediss:// or unix://, for example redis://user:password@host:6379/0, or "
            f"{SHAPE}"
        ) from None
    client.set_response_callback("XREADGROUP", cast(Any, _as_sent))
    return client


def _as_sent(reply: object, **options: object) -> object:
    """Stream reads as lists: redis-py's maps of fields cost as much again as the read."""
    return reply


class _WorkerConnection(AbstractConnection):
    """A connection that packs a batch in linear time and never swallows a cancellation.

    redis-py copies what it has packed for every further argument up to 6 kB, which costs more than
    Redis needs for a whole group. And it sends under asyncio.wait_for, which before Python 3.12
    loses a cancellation that arrives while the send completes, or fails; the task would go on for ever.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        """The command as sent: the number of words, then each with its length."""
        words = [*str(args[0]).encode().split(), *args[1:]]
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            data = word if type(word) is bytes else cast(Any, self.encoder).encode(word)
            if len(data) > _COPY_BYTES:
                parts += (b"$%d\r\n" % len(data), data, b"\r\n")
            else:
                parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
        return parts

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send; raises CancelledError where the caller was cancelled meanwhile."""
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            await super().send_packed_command(command, check_health)
        except RedisError:
            if task and task.cancelling() > before:
                raise asyncio.CancelledError from None
            raise
        if task and task.cancelling() > before:
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError


_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError, InvalidResponse)
_NO_DATABASE = ("DB index is out of range", "invalid DB index", "Invalid Database", "SELECT is not allowed")


def refusal(error: Exception) -> str | None:
    """What is to be mended in redis.url; None where the same call may be answered later.

    redis-py wraps some refusals into a ConnectionError.
    """
    is_refused = isinstance(error, _REFUSALS) or isinstance(error.__cause__, _REFUSALS)
    if is_refused or "unauthenticated" in str(error):  # so it says to those who send it much
        return f"the server does not let us in ({error}): mend the user, its password or its rights"
    if isinstance(error, RedisError) and any(words in str(error) for words in _NO_DATABASE):
        return f"the server has no such database ({error}): name another one behind the last slash, 0 is always there"
    return None


def passes(error: Exception) -> bool:
    """Whether the server may accept the same call later: full, read-only, loading, busy, its disk full, demoted."""
    names = ("OOM", "READONLY", "MISCONF", "LOADING", "BUSY ", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED")
    temporary = (BusyLoadingError, NoScriptError, OutOfMemoryError, ReadOnlyError)
    is_temporary = isinstance(error, temporary) or isinstance(error.__cause__, temporary)
    return is_temporary or _said(error).startswith(names)


def is_away(error: Exception) -> bool:
    """Whether the server cannot be reached; it may come back."""
    return isinstance(error, (Unreachable, TooLate)) and refusal(error) is None


def _said(error: Exception) -> str:
    """What the server said, without what redis-py puts before it in a pipeline."""
    return str(error).rpartition("of pipeline caused error: ")[2].lstrip("('\"")


async def until_accepted(
    redis: Redis, keys: Keys, call: Callable[[], Awaitable[_Result]], *, waits: bool = True
) -> _Result:
    """What `call` returns; while the server is away or takes no writes a worker's client repeats it.

    waits: False raises its refusal, too. Raises RunConflictError, naming the key, where a key of
    the run holds something of another type.
    """
    said_at = -math.inf
    while True:
        try:
            return await call()
        except (ResponseError, Unreachable, TooLate) as error:
            if _said(error).startswith("FENCED"):
                raise TrainerReplacedError(
                    "another trainer took the run over, because this one was silent for too long"
                ) from None
            if _said(error).startswith("WRONGTYPE"):
                await refuse_foreign_types(redis, keys)
            if not (waits and isinstance(redis, _Patient) and (passes(error) or is_away(error))):
                raise
            # That it is away is said by whoever beats.
            if passes(error) and time.monotonic() - said_at >= _SAY_EVERY_S:
                said_at = time.monotonic()
                _log.warning("redis_takes_no_writes", error=str(error))
        await asyncio.sleep(_REFUSED_WAIT_S)


class Script:
    """A Lua script, called by its hash.

    A server that does not know it, such as one just restarted, is given the text in the same call
    that runs it: between the two nothing can make it forget the script again.
    """

    def __init__(self, redis: Redis, text: str) -> None:
        self._redis = cast(Any, redis)
        self._text = text
        self._hash = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def call(self, keys: Sequence[str], arguments: Sequence[object]) -> object:
        """What it returns."""
        try:
            return await self._redis.evalsha(self._hash, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._redis.eval(self._text, len(keys), *keys, *arguments)


# Who has been replaced may look, and give back what it holds.
_OPEN_TO_ALL = frozenset({"ledger", "depths", "last_letter", "open", "release", "release_all"})


class Scripts:
    """The files of `pipeline/scripts`, each called by its name in one round trip.

    `common.lua` stands in front of each.

    A call whose reply gets lost is sent again by redis-py. Calls are numbered, and Redis keeps the
    last answer to each consumer: the repetition is answered with it and nothing is done twice. So
    one consumer makes one call at a time.

    fence: id of the trainer that calls, which must be the last that took the run over; empty for all others.
    """

    def __init__(self, redis: Redis, keys: Keys, *, consumer: str) -> None:
        folder = resources.files("pipeline") / "scripts"
        common = (folder / "common.lua").read_text()
        self._redis = redis
        self._run_keys = keys
        self._scripts = {
            file.name.removesuffix(".lua"): Script(redis, common + file.read_text())
            for file in folder.iterdir()
            if file.name.endswith(".lua") and file.name != "common.lua"
        }
        self._keys = (
            *keys.streams,
            keys.dead_letters,
            keys.ledger,
            keys.uncommitted,
            keys.evaluating,
            keys.replies,
            keys.partials,
        )
        self._consumer = consumer
        self._life = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._one_at_a_time = asyncio.Lock()
        self._meta = keys.meta
        self.fence = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that scripts touch, in the order of KEYS."""
        return self._keys

    async def call(self, name: str, *args: object, payloads: Sequence[bytes] = ()) -> Any:
        """What the script returns.

        args and reply are integers, booleans, bytes (text is sent as UTF-8) and lists of them,
        and travel as one msgpack value. payloads go beside it, as they are.
        """
        packed = cast(bytes, msgpack.packb(args, use_bin_type=False))
        async with self._one_at_a_time:
            number = f"{self._life}:{next(self._numbers)}"
            fence = "" if name in _OPEN_TO_ALL else self.fence
            arguments = [CONSUMER_GROUP, self._consumer, number, packed, fence, *payloads]
            # Repeating it changes nothing twice: the call keeps its number.
            reply = await until_accepted(
                self._redis, self._run_keys, lambda: self._scripts[name].call((*self._keys, self._meta), arguments)
            )
        return msgpack.unpackb(cast(bytes, reply), raw=True)
