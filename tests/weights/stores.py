"""Stores for weights: a directory, a place in this process, and S3 as a server speaks it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from pipeline.config import WeightSettings
from pipeline.weights import Endpoints, WeightState
from pipeline.weights.store.publisher import StorePublisher
from pipeline.weights.store.subscriber import StoreSubscriber
from tests.weights.states import DEADLINE_S, at, make_state, until

ROOT = Path(__file__).parents[2]
RUN = "run.1"
FILE_BYTES = 32 * 1024
SIZE = 400_000  # bytes of a version: a dozen files


def state_of(version: int) -> WeightState:
    """A version whose content tells which it is."""
    return make_state(version, num_bytes=SIZE)


def settings_for(store: str, **changes: object) -> WeightSettings:
    """Quick polls and small tiles."""
    return WeightSettings.model_validate({"store": store, "poll_s": 0.05, "tile_bytes": 16_384, **changes})


def endpoints(run: str = RUN) -> Endpoints:
    """What a publisher of that run says, whenever it was started."""
    return Endpoints(announce="", tiles="", session="", folder=run)


@contextmanager
def publishing(settings: WeightSettings, *, run: str = RUN, look_every_s: float = 3600.0) -> Iterator[StorePublisher]:
    """A publisher that has started; it looks after its files in the time of no test, unless asked to."""
    with StorePublisher(settings, run=run, file_bytes=FILE_BYTES, look_every_s=look_every_s) as publisher:
        assert publisher.start().folder == run
        yield publisher


@asynccontextmanager
async def store_channel(settings: WeightSettings) -> AsyncIterator[tuple[StorePublisher, StoreSubscriber]]:
    """A publisher and one subscriber."""
    with publishing(settings) as publisher:
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            yield publisher, subscriber


async def written(publisher: StorePublisher, *, failures: int | None = None) -> None:
    """Return when the newest version that was published is readable, or so many attempts have failed."""
    if failures is not None:
        await until(lambda: publisher.stats.num_failures >= failures)
        return
    await until(lambda: publisher.is_settled)


@contextmanager
def s3_server() -> Iterator[str]:
    """A server that speaks S3, in a process of its own; yields its address."""
    code = (
        "from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)\n"
        "server.start()\n"
        "print('http://%s:%d' % server.get_host_and_port(), flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Elsewhere:
    """A publisher or a subscriber in a process of its own."""

    def __init__(self, module: str, *words: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    async def line(self) -> object:
        """The next line that it prints, parsed."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            return json.loads(await asyncio.to_thread(self.process.stdout.readline))

    def kill(self) -> None:
        """End it as the kernel does when memory is short."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def new_bucket(address: str) -> str:
    """A bucket that nobody else uses."""
    name = f"b{uuid.uuid4().hex[:12]}"
    with urlopen(Request(f"{address}/{name}", method="PUT"), timeout=DEADLINE_S):
        return name


def files_of(directory: Path, run: str = RUN, *, ending: str = "") -> Sequence[str]:
    """Names in a run's folder."""
    return sorted(path.name for path in (directory / run).iterdir() if ending in path.name)
