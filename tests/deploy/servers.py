"""Redis servers with the settings in deploy/redis, and the users of a run on them.

In: a folder, a server program and a run's name. Out: a server on a unix socket or a TLS port that
ends with the test.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from deploy.redis.users import ACL_FILE, USERS, main

REDIS_FOLDER = Path(__file__).parents[2] / "deploy" / "redis"
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Users of one run. folder: what `deploy.redis.users` has written."""

    folder: Path

    def env(self, user: str) -> str:
        """REDIS_URL as the file of this user has it."""
        lines = (self.folder / f"{user}.env").read_text(encoding="utf-8").splitlines()
        values = dict(line.split("=", 1) for line in lines)
        assert f"//{values['REDIS_USERNAME']}:{values['REDIS_PASSWORD']}@" in values["REDIS_URL"]
        return values["REDIS_URL"]

    def on_socket(self, user: str, path: Path) -> str:
        """The same on a unix socket."""
        user_and_password = self.env(user).partition("://")[2].partition("@")[0]
        return f"unix://{user_and_password}@{path}?db=0"


def make_users(folder: Path, run: str, *words: str) -> Users:
    """All users of a run."""
    main(["--run", run, "--dir", str(folder), *words], standalone_mode=False)
    assert {path.stem for path in folder.iterdir()} == {*USERS, Path(ACL_FILE).stem}
    return Users(folder=folder)


@contextmanager
def serving(program: str | os.PathLike[str], folder: Path, users: Users, *words: str, url: str) -> Iterator[None]:
    """A server with deploy/redis/valkey.conf and these users; `url` is that of someone who may ping it."""
    log = folder / "server.log"
    options = ["--dir", str(folder), "--aclfile", str(users.folder / ACL_FILE), "--logfile", str(log), *words]
    process = subprocess.Popen([program, str(REDIS_FOLDER / "valkey.conf"), *options], stdout=subprocess.DEVNULL)
    try:
        _wait_for_answer(process, url, log)
        yield
    finally:
        process.terminate()
        process.wait(_DEADLINE_S)


def on_socket(path: Path) -> Sequence[str]:
    """Options for a server that listens there and nowhere else."""
    return ("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700")


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given in this block: something is bound to it, and does not listen.

    Whoever is told of it can listen there, as all servers do that may take an address again at once.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def _wait_for_answer(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while (problem := _problem(url)) is not None:
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise AssertionError(f"the server does not answer: {problem}\n{said}")
        time.sleep(0.01)


def _problem(url: str) -> RedisError | None:
    try:
        with Redis.from_url(url) as client:
            client.ping()
    except RedisError as error:
        return error
    return None
