"""A publisher in a process of its own that stops in the middle of a write, and waits to be killed: STORE RUN."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence

from pipeline.weights.codec import Encoder
from pipeline.weights.store.folder import Folder, Stamp, open_folder
from pipeline.weights.store.writer import Writer
from tests.weights.drift import drifted
from tests.weights.stores import FILE_BYTES


class Slow(Folder):
    """Another folder, of which writes end after so many files."""

    def __init__(self, folder: Folder, budget: int) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.budget = budget

    def create(self) -> None:
        self._folder.create()

    def read(self, name: str, limit: int) -> bytes:
        return self._folder.read(name, limit)

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        with self._lock:
            self.budget -= 1
            if self.budget == 0:
                self._folder.write(f"{name}.writing", [b"half a file"])
                say("the next one is half there")
        if self.budget <= 0:
            threading.Event().wait()
        self._folder.write(name, parts)

    def remove(self, name: str) -> None:
        self._folder.remove(name)

    def stamps(self) -> dict[str, Stamp]:
        return self._folder.stamps()


def say(text: str) -> None:
    """One line for whoever started this."""
    print(json.dumps(text), flush=True)  # noqa: T201


def write(store: str, run: str) -> None:
    """Version 0, and a half of version 1."""
    encoder = Encoder(session=bytes(16), tile_bytes=16_384)
    folder = Slow(open_folder(store, run), 1000)
    writer = Writer(folder, encoder, session=bytes(16), file_bytes=FILE_BYTES, grace_s=600.0, makes_patches=True)
    writer.take_over()
    writer.write(encoder.encode(drifted(0)), lambda: None)
    say("a version is readable")
    folder.budget = 4
    writer.write(encoder.encode(drifted(1)), lambda: None)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2])
