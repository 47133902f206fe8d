"""What commands have in common: which settings, which server, JSON or text.

In: the options of a command line. Out: a `Config`, a connection, printed output.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from pipeline.config import Config
    from pipeline.keys import Keys

P = ParamSpec("P")
R = TypeVar("R")
_DEFAULT_FILE = Path("rollstream.toml")
_FILES_HELP = f"Settings; later files win. Without it {_DEFAULT_FILE} where there is one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a command takes its settings from."""

    files: tuple[str, ...]
    overrides: tuple[str, ...]

    def load(self) -> Config:
        """Raises ConfigError."""
        from pipeline.settings.files import load_config

        return load_config(self.files or self._default_files(), overrides=self.overrides)

    def with_overrides(self, *overrides: str) -> Sources:
        """The same with more settings on top."""
        return Sources(files=self.files, overrides=(*self.overrides, *overrides))

    @property
    def words(self) -> str:
        """The options that lead to the same settings, as one types them; never a secret."""
        words = [word for file in self.files for word in ("-c", file)]
        for name, _, value in (text.partition("=") for text in self.overrides):
            if name.strip() == "run.name":
                words += ("--run", value.strip())
            elif name.strip() != "redis.url":
                words += ("--set", f"{name}={value}")
        return "".join(f" {shlex.quote(word)}" for word in words)

    @staticmethod
    def _default_files() -> tuple[Path, ...]:
        return (_DEFAULT_FILE,) if _DEFAULT_FILE.exists() else ()


def takes_config(function: Callable[Concatenate[Sources, P], R]) -> Callable[P, R]:
    """Adds -c, --set and --run; the command receives a `Sources` first."""

    @click.option("-c", "--config", "files", multiple=True, metavar="FILE", help=_FILES_HELP)
    @click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="One setting; wins over all.")
    @click.option("--run", "run_name", metavar="NAME", help="The same as --set run.name=NAME.")
    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        files: tuple[str, ...] = kwargs.pop("files")  # type: ignore[assignment]
        overrides: tuple[str, ...] = kwargs.pop("overrides")  # type: ignore[assignment]
        run_name = kwargs.pop("run_name")
        if run_name is not None:
            overrides = (*overrides, f"run.name={run_name}")
        outer = _outer_sources()
        return function(Sources(files=outer.files + files, overrides=outer.overrides + overrides), *args, **kwargs)

    return wrapper


def can_resume(function: Callable[Concatenate[Sources, P], R]) -> Callable[Concatenate[Sources, P], R]:
    """Adds --resume, below `takes_config`: the same as one setting, for commands that train."""

    @click.option("--resume", metavar="auto|never|DIRECTORY", help="The same as --set checkpoint.resume=...")
    @wraps(function)
    def wrapper(sources: Sources, /, *args: P.args, **kwargs: P.kwargs) -> R:
        resume = kwargs.pop("resume")
        if resume is not None:
            said = f"checkpoint.resume={json.dumps(resume)}"
            sources = Sources(files=sources.files, overrides=(*sources.overrides, said))
        return function(sources, *args, **kwargs)

    return wrapper


def _outer_sources() -> Sources:
    """What was given to the group of a command: `rollstream streams -c FILE peek`."""
    parent = click.get_current_context().parent
    if parent is not None and isinstance(parent.obj, Sources):
        return parent.obj
    return Sources(files=(), overrides=())


as_json = click.option("--json", "is_json", is_flag=True, help="Print JSON.")


def with_redis(sources: Sources, body: Callable[[Redis, Keys], Awaitable[R]], *, starts_server: bool = False) -> R:
    """Run `body` with a connection to the run's server.

    starts_server: where an `up` has ended, its private server is started for this, on what it kept.
    Raises ConfigError when there is no server to connect to or it lets us not in,
    ServiceUnavailableError when it does not answer.
    """
    import asyncio

    from redis.exceptions import RedisError

    from pipeline.keys import Keys
    from pipeline.streams import connect

    config = sources.load()

    async def connected(resolved: Config) -> R:
        # A person waits for the answer: no retries.
        async with connect(resolved.redis, retries=0) as redis:
            return await body(redis, Keys(config.run.name))

    with _served(config, sources.words, starts_server=starts_server) as resolved:
        try:
            return asyncio.run(connected(resolved))
        except (RedisError, OSError) as error:
            raise _explained(error, resolved) from None


@contextmanager
def _served(config: Config, words: str, *, starts_server: bool) -> Iterator[Config]:
    """The settings with the address of a server that is there."""
    from pipeline.local.run import kept_server
    from pipeline.local.server_address import is_without_server, kept_dir, with_server

    if starts_server and is_without_server(config) and kept_dir(config).is_dir():
        with kept_server(config) as resolved:
            yield resolved
        return
    yield with_server(config, words)


def _explained(error: Exception, config: Config) -> Exception:
    """What a person can do about it; the error itself where that is nothing."""
    from redis.exceptions import ConnectionError as Unreachable
    from redis.exceptions import TimeoutError as TooLate

    from pipeline.errors import ConfigError, ServiceUnavailableError
    from pipeline.queues.connection import passes, refusal
    from pipeline.settings.files import server_name

    server = server_name(config.redis)
    if why := refusal(error):
        return ConfigError(f"{server}: {why}")
    if passes(error):
        return ServiceUnavailableError(f"{server}: the server does not take this now ({error}); try again when it does")
    if isinstance(error, (Unreachable, TooLate, OSError)):
        return ServiceUnavailableError(
            f"{server}: the server does not answer ({type(error).__name__}); start it, or mend redis.url (REDIS_URL)"
        )
    return error
