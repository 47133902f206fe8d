"""A primary, a replica and three Sentinels that watch over them: real processes that end with the test.

In: a folder, and a server program. Out: a `redis.url` that names the Sentinels, and a way to kill the primary.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.deploy.servers import reserved_port

SERVICE = "queues"
_DEADLINE_S = 180.0
# How often Sentinels look. Who has heard nothing of a failover for four times publish-period undoes it.
_QUICK = {"info-period": 100, "ask-period": 100, "publish-period": 500}  # ms
_DOWN_AFTER_MS, _FAILOVER_TIMEOUT_MS = 1000, 10_000


class Watched:
    """servers: port -> process of the primary, and of the replica. sentinels: ports."""

    def __init__(self, program: Path, folder: Path, stack: ExitStack) -> None:
        self._program, self._folder, self._stack = program, folder, stack
        primary, replica, *others = (stack.enter_context(reserved_port()) for _ in range(5))
        server = ("--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")
        self.servers = {
            primary: self._start(primary, *server),
            replica: self._start(replica, *server, "--replicaof", f"127.0.0.1 {primary}"),
        }
        until(lambda: asked(replica).info("replication")["master_link_status"] == "up", "a replica")
        self._primary = primary
        self.sentinels = [self._start_sentinel(port) for port in others]
        until(self._is_whole, "Sentinels that know each other")

    @property
    def url(self) -> str:
        """Of the primary, whichever it is."""
        places = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{places}/{SERVICE}/0"

    @property
    def primary(self) -> int:
        """Port of the primary, when all Sentinels agree on it; else 0."""
        found = {asked(port).sentinel_get_master_addr_by_name(SERVICE)[1] for port in self.sentinels}
        return int(found.pop()) if len(found) == 1 else 0

    def hand_over(self) -> None:
        """The primary and the replica change their parts, as for maintenance; returns when all agree."""
        before = self.primary

        def has_changed() -> bool:
            if self.primary not in {0, before}:
                return True
            asked(self.sentinels[0]).execute_command("SENTINEL", "FAILOVER", SERVICE)  # refused while one goes on
            return False

        until(has_changed, "another primary")
        until(self._is_whole, "a replica of it")

    def kill_primary(self) -> None:
        """SIGKILL."""
        until(lambda: self.primary, "Sentinels that agree")  # a busy machine may have made them change it
        process = self.servers.pop(self.primary)
        process.kill()
        process.wait()

    def _is_whole(self) -> bool:
        replicas = [asked(port).info("replication") for port in self.servers if port != self.primary]
        links = [replica.get("master_link_status") for replica in replicas]
        return links == ["up"] and all(self._is_ready(port) for port in self.sentinels)

    def _start(self, port: int, *words: str) -> subprocess.Popen[bytes]:
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        place = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--logfile", str(folder / "log"))
        process = subprocess.Popen([self._program, *words, *place], stdout=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        until(lambda: asked(port).ping(), f"an answer at port {port}")
        return process

    def _start_sentinel(self, port: int) -> int:
        settings = self._folder / f"{port}.conf"
        settings.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._primary} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {_DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} {_FAILOVER_TIMEOUT_MS}\n"
        )
        self._start(port, str(settings), "--sentinel")
        for period, every_ms in _QUICK.items():
            asked(port).execute_command("SENTINEL", "DEBUG", period, every_ms)
        return port

    def _is_ready(self, port: int) -> bool:
        state, replicas = asked(port).sentinel_masters()[SERVICE], asked(port).sentinel_slaves(SERVICE)
        return state["num-other-sentinels"] == 2 and [item["flags"] for item in replicas] == ["slave"]


def asked(port: int) -> Any:
    """A client that is closed when nobody needs it."""
    return Redis(port=port, protocol=2, single_connection_client=False)


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for what processes do."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        with suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {_DEADLINE_S:g} s: {what}"
        time.sleep(0.01)


@contextmanager
def watched(program: Path, folder: Path) -> Iterator[Watched]:
    """All of them, ready for a failover."""
    with ExitStack() as stack:
        yield Watched(program, folder, stack)
