"""Both ends of a weight channel for a measurement: a publisher, and receivers in processes of their own.

In: a size and settings. Out: when what was published was there, by a clock that all share.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from benchmarks.weight_states import State, moved, random_weights
from pipeline.config import WeightSettings
from pipeline.weights import Endpoints, HostTensor, WeightKind, WeightState
from pipeline.weights.process import PublisherProcess

ROOT = Path(__file__).parent.parent
DENSITY = 0.01
_NUM_TENSORS = 16
_DEADLINE_S = 120.0


class Model:
    """Versions that differ from the one before in one percent of their values: two contents in turn."""

    def __init__(self, num_bytes: int) -> None:
        old = random_weights(num_bytes)
        self.num_bytes = num_bytes
        self._contents: tuple[State, State] = old, moved(old, DENSITY)

    def state(self, version: int) -> WeightState:
        """As a trainer has it."""
        parts = np.array_split(self._contents[version % 2], _NUM_TENSORS)
        return WeightState(
            weight_version=version,
            kind=WeightKind.SNAPSHOT,
            tensors={
                f"layer.{number}": HostTensor(dtype="bfloat16", shape=part.shape, data=part.view(np.uint8).data)
                for number, part in enumerate(parts)
            },
        )


class Receiver:
    """A process that receives. through: a command in front of its own, that puts it somewhere."""

    def __init__(
        self,
        settings: WeightSettings,
        endpoints: Endpoints | None,
        *,
        folder: str = "",
        through: Sequence[str] = (),
    ) -> None:
        place = {
            "settings": settings.model_dump(),
            "endpoints": asdict(endpoints) if endpoints else None,
            "folder": folder,
        }
        self.process = subprocess.Popen(
            [*through, sys.executable, "-m", "benchmarks.weight_peer", json.dumps(place)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.relay = self.answer()["relay"]

    def tell(self, do: str, **fields: Any) -> None:
        """Begin with something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What came of it. Raises EOFError where the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"a receiver has ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Both."""
        self.tell(do, **fields)
        return self.answer()

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Trainer:
    """A publisher in a process of its own, and versions for it. process: where it runs."""

    def __init__(self, model: Model, settings: WeightSettings) -> None:
        before = set(psutil.Process().children())
        self.publisher = PublisherProcess(settings)
        (self.process,) = set(psutil.Process().children()) - before
        self.endpoints = self.publisher.start()
        self.version = -1
        self._model = model

    def publish(self) -> float:
        """The next version; when the step that made it was done."""
        self.version += 1
        state = self._model.state(self.version)
        done = time.monotonic()
        self.publisher.publish(state)
        return done

    def sent_bytes(self) -> int:
        """Up to now: the process tells once a second, so this waits for two tellings that agree."""
        deadline = time.monotonic() + _DEADLINE_S
        seen = self.publisher.stats
        while time.monotonic() < deadline:
            time.sleep(0.01)
            told = self.publisher.stats
            if told is not seen:
                if told.server.num_bytes == seen.server.num_bytes:
                    return told.server.num_bytes
                seen = told
        raise TimeoutError("the publisher does not tell what it has sent")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.publisher.close()


def update(trainer: Trainer, receivers: Sequence[Receiver]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from a step that is done until all of these have its weights, verified, and what each says."""
    above = trainer.version if trainer.version >= 0 else None
    for receiver in receivers:
        receiver.tell("next", above=above)
    done = trainer.publish()
    answers = [receiver.answer() for receiver in receivers]
    return max(float(answer["at"]) for answer in answers) - done, answers


@contextmanager
def bare_sender(num_bytes: int, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """Sends as many bytes to whoever connects and asks: a loop over a socket, and nothing else."""
    content = memoryview(np.random.default_rng(0).bytes(num_bytes))
    with socket.create_server((host, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    if connection.recv(1):
                        connection.sendall(content)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield host, server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """What is started here runs on that core only, where there is one; this thread goes back."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(mine)[core % len(mine)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
