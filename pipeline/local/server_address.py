"""How commands on the same machine find the private server of a running `up`.

In: a run's directory. Out: the URL of its server while that lives. Only the user who started the
run may read it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import SecretStr

from pipeline.config import Config
from pipeline.disk import write_whole
from pipeline.errors import ConfigError

_FILE = "server.json"


def announce_server(run_dir: Path, url: str) -> None:
    """Say where the server is that this process has started."""
    write_whole(run_dir / _FILE, json.dumps({"url": url, "pid": os.getpid()}), mode=0o600)


def withdraw_server(run_dir: Path) -> None:
    """Undo `announce_server`."""
    (run_dir / _FILE).unlink(missing_ok=True)


def find_server(run_dir: Path) -> str | None:
    """URL of the run's private server, None when the process that started it is gone."""
    try:
        stored = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
        url, pid = str(stored["url"]), int(stored["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    import psutil  # every worker imports this module, and few need that one

    return url if psutil.pid_exists(pid) else None


def is_without_server(config: Config) -> bool:
    """Whether the run has a server of its own, which ends with its `up`, and no `up` is there."""
    return config.redis.is_embedded and find_server(config.run_dir) is None


def kept_dir(config: Config) -> Path:
    """Where the private server of a run keeps its data."""
    return config.run_dir / "redis"


def with_server(config: Config, words: str = "") -> Config:
    """The same settings with a URL that can be connected to.

    words: the options by which a command finds these settings. Raises ConfigError where the server
    is to be embedded and no `up` of this run is there.
    """
    if not config.redis.is_embedded:
        return config
    url = find_server(config.run_dir)
    if url is None:
        looks = f" (`rollstream streams{words}` shows what it has kept)" if kept_dir(config).is_dir() else ""
        raise ConfigError(
            f'redis.url = "embedded": only `up` starts a server of its own, and no `up` of run {config.run.name!r} is '
            f"running below {config.run.dir}/. Start it with `rollstream up{words}`{looks}, or name a server with "
            "REDIS_URL"
        )
    return with_url(config, url)


def with_url(config: Config, url: str) -> Config:
    """The same settings with another redis.url."""
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": SecretStr(url)})})
