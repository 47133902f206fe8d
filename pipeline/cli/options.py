"""What commands have in common: which settings, which server, JSON or text.

In: the options of a command line. Out: a `Config`, a connection, printed output.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
        from pipeline.config_files import load_config

        return load_config(self.files or self._default_files(), overrides=self.overrides)

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


def _outer_sources() -> Sources:
    """What was given to the group of a command: `rollstream streams -c FILE peek`."""
    parent = click.get_current_context().parent
    if parent is not None and isinstance(parent.obj, Sources):
        return parent.obj
    return Sources(files=(), overrides=())


as_json = click.option("--json", "is_json", is_flag=True, help="Print JSON.")


def with_redis(config: Config, body: Callable[[Redis, Keys], Awaitable[R]]) -> R:
    """Run `body` with a connection to the run's server.

    Raises ConfigError when there is no server to connect to, ServiceUnavailableError when it does not answer.
    """
    import asyncio

    from redis.exceptions import ConnectionError as Unreachable
    from redis.exceptions import TimeoutError as TooLate

    from pipeline.config_files import mask_url
    from pipeline.errors import ServiceUnavailableError
    from pipeline.keys import Keys
    from pipeline.server_address import with_server
    from pipeline.streams import connect

    resolved = with_server(config)

    async def connected() -> R:
        # A person waits for the answer: no retries.
        async with connect(resolved.redis, retries=0) as redis:
            return await body(redis, Keys(config.run.name))

    try:
        return asyncio.run(connected())
    except (Unreachable, TooLate, OSError) as error:
        url = mask_url(resolved.redis.url.get_secret_value())
        raise ServiceUnavailableError(
            f"redis.url = {url}: the server does not answer ({type(error).__name__})"
        ) from None
