"""Users of the Redis server: one for each role, with its own keys and commands and nothing else.

In: the name of a run and where its server is. Out: a folder with `users.acl` for the server and, for
each user, `ROLE.env` with its REDIS_URL, for its owner alone. It prints names, never a password.

    python -m deploy.redis.users --run my-run --server queue-host:6379 --dir secrets
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import click

from pipeline.errors import RollstreamError, UsageError
from pipeline.keys import Keys

ACL_FILE = "users.acl"
# The server's user reads users.acl, which has hashes of long random passwords.
_OWNER_ONLY, _FOR_ALL, _OWNER_ONLY_FOLDER = 0o600, 0o644, 0o700

# What every worker asks: to get in, to join, to beat, to leave.
_CONNECTION = "type evalsha eval time"
_PRESENCE = "hget hmget hset hsetnx hdel"
# What the scripts of a stage do with groups: claim, renew, hand over, give back, bury.
_GROUPS = (
    "xreadgroup xautoclaim xclaim xpending xrange xlen xadd xack xdel xgroup|create xgroup|delconsumer "
    "xinfo|consumers hincrby hexists hlen srem"
)
# What the trainer does besides: feed, drop, finish, commit; and its lock.
_TRAINING = "get set del pttl hgetall scard sadd sismember xinfo|groups xrevrange"
_WATCHING = "get hgetall hlen scard xlen xrange xrevrange xpending xinfo|groups info"
# What people do: peek, requeue, reset, scale, and everything above.
_OPERATING = "exists scan unlink pexpire"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a user may do. keys: names of properties of `Keys`. reads: those that it may only read."""

    keys: tuple[str, ...]
    commands: str
    reads: tuple[str, ...] = ()


# Scripts name all keys of the streams, so everybody who calls one must be allowed to touch these.
_STREAMS = ("streams", "dead_letters", "ledger", "uncommitted", "evaluating", "replies", "partials")
_FLEET = ("meta", "control", "workers")
_DEVICE = ("device_turn", "device_wish")

USERS = {
    "trainer": Access(
        keys=(*_STREAMS, *_FLEET, "trainer_lock", *_DEVICE), commands=f"{_CONNECTION} {_PRESENCE} {_GROUPS} {_TRAINING}"
    ),
    # A generator that shares its device with the trainer takes and gives a turn: get, set, del of one key.
    "generator": Access(
        keys=(*_STREAMS, *_FLEET, *_DEVICE), commands=f"{_CONNECTION} {_PRESENCE} {_GROUPS} get set del"
    ),
    "scorer": Access(keys=(*_STREAMS, *_FLEET), commands=f"{_CONNECTION} {_PRESENCE} {_GROUPS}"),
    "teacher": Access(keys=(*_STREAMS, *_FLEET), commands=f"{_CONNECTION} {_PRESENCE} {_GROUPS}"),
    "judge": Access(keys=(*_STREAMS, *_FLEET), commands=f"{_CONNECTION} {_PRESENCE} {_GROUPS}"),
    "exporter": Access(
        keys=(*_STREAMS, *_FLEET),
        reads=("trainer_lock", "crew"),
        commands=f"{_CONNECTION} hget hmget hset hdel {_WATCHING}",
    ),
    "operator": Access(
        keys=("pattern",), commands=f"{_CONNECTION} {_PRESENCE} {_GROUPS} {_TRAINING} {_WATCHING} {_OPERATING}"
    ),
    # KEDA, or whatever else counts what waits and starts workers. KEDA asks for the version of the server before each.
    "autoscaler": Access(keys=(), reads=("streams",), commands="info xinfo|groups xpending xlen"),
}
# For probes: any password will do, and all that it may say is PING.
HEALTH = "user health on nopass resetkeys resetchannels -@all +ping"


def user_name(user: str, run: str) -> str:
    """What the server calls it: users of several runs fit into one ACL file."""
    return f"{run}.{user}"


def acl_line(user: str, run: str, password: str) -> str:
    """The line of an ACL file that makes `user` for `run`."""
    access, keys = USERS[user], Keys(run)
    patterns = [f"~{key}" for key in _spelled(keys, access.keys)]
    patterns += [f"%R~{key}" for key in _spelled(keys, access.reads)]
    commands = [f"+{name}" for name in dict.fromkeys(access.commands.split())]
    digest = hashlib.sha256(password.encode()).hexdigest()
    # What redis-py says of itself has other names in every version; all of it is in @connection.
    rules = ["resetkeys", *patterns, "resetchannels", "-@all", "+@connection", "-@dangerous", *commands]
    return " ".join(["user", user_name(user, run), "on", f"#{digest}", *rules])


def acl_text(run: str, passwords: dict[str, str]) -> str:
    """An ACL file: these users, the one for probes, and no one else."""
    lines = ["user default off", HEALTH, *(acl_line(user, run, password) for user, password in passwords.items())]
    return "".join(f"{line}\n" for line in lines)


def _spelled(keys: Keys, names: Iterable[str]) -> Iterable[str]:
    for name in names:
        value = getattr(keys, name)
        yield from (value,) if isinstance(value, str) else value


def _write(file: Path, text: str, mode: int = _OWNER_ONLY) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise UsageError(f"{file} is there already: remove it, or choose another --dir") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as target:
        os.fchmod(target.fileno(), mode)  # whatever the umask is
        target.write(text)


@click.command()
@click.option("--run", "run_name", required=True, metavar="NAME", help="The run's name, as in run.name.")
@click.option("--server", default="localhost:6379", show_default=True, metavar="HOST:PORT", help="As workers reach it.")
@click.option("--dir", "folder", required=True, type=click.Path(path_type=Path), help="Made if missing.")
@click.option("--tls", "is_tls", is_flag=True, help="Write rediss:// addresses.")
@click.option("--ca", metavar="FILE", help="With --tls: the authority that workers trust, a path there.")
def main(run_name: str, server: str, folder: Path, is_tls: bool, ca: str | None) -> None:
    """Make one Redis user for each role of a run."""
    if ca and not is_tls:
        raise UsageError("--ca is for --tls")
    passwords = {user: secrets.token_urlsafe(24) for user in USERS}
    scheme, query = ("rediss" if is_tls else "redis"), (f"?ssl_ca_certs={quote(ca, safe='/')}" if ca else "")
    folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    _write(folder / ACL_FILE, acl_text(run_name, passwords), _FOR_ALL)
    for user, password in passwords.items():
        name = user_name(user, run_name)
        # The address is for workers; name and password are for those who want them apart, such as KEDA.
        lines = [f"REDIS_URL={scheme}://{name}:{password}@{server}/0{query}"]
        lines += [f"REDIS_USERNAME={name}", f"REDIS_PASSWORD={password}"]
        _write(folder / f"{user}.env", "\n".join(lines) + "\n")
    click.echo(f"{folder / ACL_FILE}: for the server")
    click.echo(f"{folder}/ROLE.env: REDIS_URL of {', '.join(USERS)}")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (click.ClickException, RollstreamError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"error: {message}", err=True)
        sys.exit(2)
