"""The process that serves weights for a trainer.

In: the file descriptor of a socket to the trainer. Out: a publisher whose content is the trainer's
shared memory. It ends when the trainer's end of the socket does, and not before: signals are the
trainer's to handle, whose last weights somebody may still want.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
from collections import deque
from dataclasses import asdict
from typing import Any

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError, WeightError
from pipeline.weights.manifest import read_table
from pipeline.weights.process import receive, send
from pipeline.weights.publisher import WeightPublisher
from pipeline.weights.slots import Slot
from pipeline.weights.state import WeightKind

_STATS_EVERY_S = 1.0


class Serving:
    """What the trainer asks for is taken in by one thread and done by another, the newest first."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._returned: queue.SimpleQueue[int] = queue.SimpleQueue()  # filled even out of a garbage collection
        self._asked: deque[dict[str, Any] | None] = deque()
        self._is_asked = threading.Semaphore(0)
        self._slots: dict[int, Slot] = {}
        self._fds: list[int] = []

    def run(self) -> int:
        """Serve until the trainer closes its end. Returns the exit code."""
        messages = receive(self._channel, self._fds.extend)
        settings = next(messages, None)
        if settings is None:
            return 1
        try:
            publisher = WeightPublisher(WeightSettings.model_validate_json(settings["settings"]))
            with publisher:
                self._say({"endpoints": asdict(publisher.start())})
                worker = threading.Thread(target=self._work, args=(publisher,), name="weight-encoder")
                teller = threading.Thread(target=self._tell, args=(publisher,), name="weight-slots", daemon=True)
                worker.start()
                teller.start()
                for message in messages:
                    self._ask(message)
                self._ask(None)
                worker.join()
        except ConfigError as error:
            self._say({"error": str(error)})
            return 2
        return 0

    def _ask(self, message: dict[str, Any] | None) -> None:
        self._asked.append(message)
        self._is_asked.release()

    def _work(self, publisher: WeightPublisher) -> None:
        """Do what was asked; where that breaks, the process ends, as the trainer has to know."""
        try:
            self._work_off(publisher)
        finally:
            with contextlib.suppress(OSError):  # the trainer may have gone
                self._channel.shutdown(socket.SHUT_RDWR)

    def _work_off(self, publisher: WeightPublisher) -> None:
        while self._is_asked.acquire() and (message := self._asked.popleft()) is not None:
            if "new_slot" in message:
                self._slots[message["new_slot"]] = slot = Slot(
                    message["new_slot"], self._fds.pop(0), message["num_bytes"]
                )
                slot.close()
            elif any(later is not None and "slot" in later for later in tuple(self._asked)):
                self._returned.put(message["slot"])  # overtaken
            else:
                self._publish(publisher, message)
                self._say({"stats": asdict(publisher.stats)})

    def _publish(self, publisher: WeightPublisher, message: dict[str, Any]) -> None:
        content = self._slots[message["slot"]].lend(message["num_bytes"], self._returned.put)
        table = read_table(message["tensors"])
        try:
            publisher.publish_content(message["weight_version"], WeightKind(message["kind"]), table, content)
        except WeightError as error:
            self._say({"failure": str(error)})

    def _tell(self, publisher: WeightPublisher) -> None:
        """Tell the trainer of slots that nobody reads any more, and what was sent."""
        while True:
            try:
                self._say({"free": self._returned.get(timeout=_STATS_EVERY_S)})
            except queue.Empty:
                self._say({"stats": asdict(publisher.stats)})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                send(self._channel, message)
        except OSError:
            return  # the trainer has gone; the end of its messages says so too


def main(fd: int) -> int:
    """Exit code of the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=fd) as channel:
        return Serving(channel).run()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
