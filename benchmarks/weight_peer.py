"""A process that receives weights and does what it is told: `python -m benchmarks.weight_peer PLACE`.

In: where the weights come from, as JSON, and a command in each line. Out: a line of JSON for each.
Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import WeightSettings
from pipeline.weights import Endpoints, WeightState, WeightSubscriber
from pipeline.weights.address_watch import Resolve
from pipeline.weights.receiver import Subscriber
from pipeline.weights.relay import Relay, resolve_in_tree
from pipeline.weights.sharing import SharedSubscriber

CHUNK_BYTES = 1 << 20  # of a bare transfer at once


class Peer:
    """place: settings, endpoints (or none), and a folder to share in (or none)."""

    def __init__(self, place: dict[str, Any]) -> None:
        self._answers, sys.stdout = sys.stdout, sys.stderr  # where log events go
        self._settings = WeightSettings.model_validate(place["settings"])
        self._root = Endpoints(**place["endpoints"]) if place["endpoints"] else None
        self._folder = place["folder"]
        self._relay = Relay(self._settings) if self._settings.relay else None
        self._relays: list[tuple[str, Endpoints]] = []
        self._name = ""
        self._subscriber: Subscriber | None = None
        self._state: WeightState | None = None  # held as an engine holds it, until the next is there
        self._own: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._buffer = bytearray()

    async def run(self) -> None:
        """Obey until the input ends."""
        self._say({"relay": asdict(self._relay.start()) if self._relay else None})
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            self._say(await getattr(self, f"do_{command.pop('do')}")(**command))
        if self._subscriber is not None:
            self._subscriber.close()

    async def do_join(self) -> dict[str, Any]:
        """Forget everything and be a new receiver."""
        if self._subscriber is not None:
            self._subscriber.close()
            await asyncio.sleep(0)
        self._state, self._subscriber = None, self._created()
        return {}

    async def do_next(self, above: int | None) -> dict[str, Any]:
        """The newest version above."""
        subscriber = self._subscriber = self._subscriber or self._created()
        began, busy = time.monotonic(), time.process_time()
        self._state = await subscriber.next(above)
        at, stats = time.monotonic(), subscriber.stats
        return {
            "version": self._state.weight_version,
            "began": began,
            "at": at,
            "cpu_s": time.process_time() - busy,
            "num_received_bytes": stats.num_received_bytes,
            "num_resumed_tiles": stats.num_resumed_tiles,
            "num_patched": stats.num_patched,
        }

    async def do_follow(self, until: int) -> dict[str, Any]:
        """All versions until that one, each as `next` tells of it."""
        seen: list[dict[str, Any]] = []
        while not seen or seen[-1]["version"] < until:
            seen.append(await self.do_next(seen[-1]["version"] if seen else self._version))
        return {"seen": seen}

    async def do_apply(self) -> dict[str, Any]:
        """Copy the weights where an engine of its own would have them."""
        assert self._state is not None
        began = time.monotonic()
        for name, tensor in self._state.tensors.items():
            source = np.frombuffer(tensor.data, dtype=np.uint8)
            np.copyto(self._own.setdefault(name, np.empty_like(source)), source)
        return {"began": began, "at": time.monotonic()}

    async def do_tree(self, relays: Sequence[tuple[str, dict[str, str]]], name: str) -> dict[str, Any]:
        """Fetch from whom the tree of these relays says."""
        self._name, self._relays = name, [(key, Endpoints(**found)) for key, found in relays]
        return {}

    async def do_raw(self, host: str, port: int, num_bytes: int) -> dict[str, Any]:
        """Ask for bytes of a bare socket and receive them into one buffer."""
        if len(self._buffer) != num_bytes:
            self._buffer = bytearray(num_bytes)
        with socket.create_connection((host, port)) as connection, memoryview(self._buffer) as view:
            began, busy, received = time.monotonic(), time.process_time(), 0
            connection.sendall(b"!")
            while received < num_bytes:
                received += connection.recv_into(view[received : received + CHUNK_BYTES])
            return {"began": began, "at": time.monotonic(), "cpu_s": time.process_time() - busy}

    @property
    def _version(self) -> int | None:
        return self._state.weight_version if self._state else None

    def _created(self) -> Subscriber:
        resolve: Resolve = self._trainer
        if self._relay is not None:
            resolve = resolve_in_tree(
                self._trainer, self._listed, own_id=self._name, fanout=self._settings.relay_fanout
            )
        if self._folder:
            return SharedSubscriber(self._settings, resolve=resolve, folder=Path(self._folder), relay=self._relay)
        return WeightSubscriber(self._settings, resolve=resolve, relay=self._relay)

    async def _trainer(self) -> Endpoints | None:
        return self._root

    async def _listed(self) -> Sequence[tuple[str, Endpoints]]:
        return self._relays

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


if __name__ == "__main__":
    asyncio.run(Peer(json.loads(sys.argv[1])).run())
