"""The other ranks of a trainer on this machine, started by rank 0 itself.

In: settings. Out: processes that have joined it, or will; each reads its settings from its standard input. One
that ends before it is told to makes rank 0 drain, and its exit code that of a failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from pipeline.config import Config
from pipeline.logs import get_logger
from pipeline.programs import program
from pipeline.ranks.place import Place

_HOST = "127.0.0.1"
_LAST_S = 10.0


class Crew:
    """Ranks 1 and up. has_lost: whether one has ended unasked."""

    def __init__(self, config: Config, port: int) -> None:
        self.has_lost = False
        self._is_over = False
        self._processes = [_start(config, rank, port) for rank in range(1, config.trainer.num_ranks)]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code and not self._is_over:
            self.has_lost = True
            get_logger().error("rank_lost", rank=rank, exit_code=code, consequence="this trainer ends")
            os.kill(os.getpid(), signal.SIGTERM)

    def expect_end(self) -> None:
        """From now on ranks may end."""
        self._is_over = True

    def end(self) -> None:
        """Wait for their end; kill what does not come to it."""
        self._is_over = True
        for process in self._processes:
            try:
                process.wait(_LAST_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def started(config: Config) -> Iterator[tuple[Place, Crew]]:
    """The place of this process, rank 0, as torchrun would have said it; the others are being started."""
    import torch.distributed as dist

    # On a free port, and before the others look for it.
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    os.environ |= _variables(config, 0, store.port)
    crew = Crew(config, store.port)
    try:
        yield Place(size=config.trainer.num_ranks), crew
    finally:
        crew.end()


def _start(config: Config, rank: int, port: int) -> subprocess.Popen[bytes]:
    # It ends with this process, of which it is told: by the time it looks it may have another parent.
    words = [*program("workers.rank"), str(os.getpid())]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, **_variables(config, rank, port)})
    assert process.stdin is not None, "it was asked for"
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        # Nothing of it reaches a server, so no password has to.
        stdin.write(config.model_dump_json(exclude={"redis"}).encode())
    return process


def _variables(config: Config, rank: int, port: int) -> dict[str, str]:
    """What torchrun sets. The store is there already, as torchrun's is."""
    return {
        "WORLD_SIZE": str(config.trainer.num_ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
