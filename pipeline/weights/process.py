"""A publisher in a process of its own: the trainer writes a version into shared memory and goes on.

In: weight states. Out: what `WeightPublisher` gives, hashed, compared and sent by another processor
than the trainer's. Versions that the process has not begun with are overtaken by newer ones.

    trainer: publish --copy--> slot ---> the process: hash, compare, serve ---> subscribers
                     <-------- slot is free, when no one reads it any more ----
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import msgpack

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError, WeightError
from pipeline.logs import get_logger
from pipeline.programs import program
from pipeline.weights.codec import content_table, write_content
from pipeline.weights.manifest import check_newer, table_rows
from pipeline.weights.protocol import NOTHING
from pipeline.weights.publisher import PublisherStats
from pipeline.weights.server import ServerStats
from pipeline.weights.slots import Slot
from pipeline.weights.state import Endpoints, WeightState

_MAX_SLOTS = 4  # one served, one being read, one being written, one that a slow reader still has
_WAIT_S = 1.0
_SILENT_S = 30.0  # it says something every second
_END_S = 10.0

log = get_logger()


class PublisherProcess:
    """Has the methods of `WeightPublisher`. `publish` may be called from any thread."""

    def __init__(self, settings: WeightSettings) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [*program("pipeline.weights.serving"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._messages = receive(self._channel)
        self._send({"settings": settings.model_dump_json()})
        self._slots: dict[int, Slot] = {}
        self._free: set[int] = set()
        self._changed = threading.Condition()
        self._silence = _Silence()
        self._publishing = threading.Lock()
        self._listener: threading.Thread | None = None
        self._last_version = NOTHING
        self._is_closed = False
        self._has_ended = False
        self._failure = ""
        self._publish_s = 0.0
        self._stats = PublisherStats(num_versions=0, num_held=0, num_receivers=0, publish_s=0.0, server=ServerStats())

    def start(self) -> Endpoints:
        """Wait until it serves. Raises ConfigError: port in use, an address that is not this machine's."""
        assert self._listener is None, "started twice"
        answer = next(self._messages, None)
        if answer is None or "endpoints" not in answer:
            self.close()
            raise ConfigError(answer["error"] if answer else "the process that serves weights ended at its start")
        self._listener = threading.Thread(target=self._listen, name="weight-process", daemon=True)
        self._listener.start()
        return Endpoints(**answer["endpoints"])

    def publish(self, state: WeightState) -> None:
        """Copy `state` to shared memory and hand it over; returns when the caller may change its tensors.

        Raises WeightError: a version that is not higher than the last, tensors that contradict their
        dtype and shape, no memory, or a process that has ended or could not publish what it was given.
        """
        with self._publishing:
            started = time.perf_counter()
            check_newer(state.weight_version, self._last_version)
            table, num_bytes = content_table(state)
            slot = self._free_slot(num_bytes)
            try:
                write_content(state, table, [slot.content(num_bytes)] if num_bytes else [])
            except BaseException:
                self._give_back(slot)  # or four of these would leave the next one waiting for ever
                raise
            self._send(
                {
                    "slot": slot.number,
                    "num_bytes": num_bytes,
                    "weight_version": state.weight_version,
                    "kind": state.kind.value,
                    "tensors": table_rows(table),
                }
            )
            self._last_version = state.weight_version
            self._publish_s += time.perf_counter() - started

    @property
    def is_serving(self) -> bool:
        """Whether the process is there, says so, and could publish what it was given."""
        is_there = self._listener is not None and self._listener.is_alive()
        return is_there and not self._failure and not self._silence.is_too_long()

    @property
    def stats(self) -> PublisherStats:
        """Figures since the start, up to the last thing that the process has said."""
        return self._stats

    def close(self) -> None:
        """Stop serving and free everything. Safe to call twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()  # for a `publish` that waits
        with self._publishing:
            self._channel.shutdown(socket.SHUT_WR)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._listener is not None:
                self._listener.join()
            self._channel.close()
            for slot in self._slots.values():
                slot.close()

    def __enter__(self) -> PublisherProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _free_slot(self, num_bytes: int) -> Slot:
        """A slot that nobody reads, large enough. Waits while all are read, and the process is alive."""
        with self._changed:
            while True:
                if self._failure or self._has_ended or self._is_closed:
                    raise WeightError(self._failure or "the process that serves weights has ended")
                if self._free:
                    slot = self._slots[self._free.pop()]
                    if slot.num_bytes >= num_bytes:
                        return slot
                    slot.close()
                    return self._new_slot(slot.number, num_bytes)
                if len(self._slots) < _MAX_SLOTS:
                    return self._new_slot(len(self._slots), num_bytes)
                if self._silence.is_too_long():
                    raise WeightError(f"the process that serves weights gave no sign of life for {_SILENT_S:g} s")
                if not self._changed.wait(_WAIT_S):
                    log.warning("weights_wait_for_a_free_slot", num_slots=len(self._slots))

    def _give_back(self, slot: Slot) -> None:
        with self._changed:
            self._free.add(slot.number)
            self._changed.notify_all()

    def _new_slot(self, number: int, num_bytes: int) -> Slot:
        slot = self._slots[number] = Slot.create(number, num_bytes)
        self._send({"new_slot": number, "num_bytes": num_bytes}, slot.fd)
        return slot

    def _listen(self) -> None:
        """Take in what the process says, until it ends."""
        for message in self._messages:
            with self._changed:
                self._silence.end()
                if "free" in message:
                    self._free.add(message["free"])
                if "failure" in message:
                    self._failure = message["failure"]
                    log.error("weights_not_published", reason=self._failure)
                if "stats" in message:
                    self._stats = read_stats(message["stats"], self._publish_s)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        try:
            send(self._channel, message, *fds)
        except OSError as error:
            raise WeightError("the process that serves weights has ended") from error


class _Silence:
    """How long nothing was heard. One that is found is believed only after another second of listening:
    it may have been this process that stood still."""

    def __init__(self) -> None:
        self._heard_at = time.monotonic()
        self._found_at: float | None = None

    def end(self) -> None:
        """Something was heard."""
        self._heard_at, self._found_at = time.monotonic(), None

    def is_too_long(self) -> bool:
        now = time.monotonic()
        if now - self._heard_at < _SILENT_S:
            return False
        if self._found_at is None:
            self._found_at = now
            log.warning("weight_process_silent", silent_s=round(now - self._heard_at, 1))
        return now - self._found_at >= _WAIT_S


def send(channel: socket.socket, message: dict[str, Any], *fds: int) -> None:
    """One message, and files that go with it. To be called by one thread at a time."""
    body = msgpack.packb(message)
    frame = len(body).to_bytes(4, "little") + body
    sent = socket.send_fds(channel, [frame], list(fds)) if fds else 0
    channel.sendall(frame[sent:])


def receive(channel: socket.socket, on_fds: Callable[[list[int]], object] = lambda _: None) -> Iterator[Any]:
    """Every message until the other end closes. on_fds: gets the files, before the message they came with."""
    waiting = b""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(channel, 65536, 8)
        except ConnectionError:
            return
        if fds:
            on_fds(fds)
        if not data:
            return
        waiting += data
        while len(waiting) >= 4 and len(waiting) >= 4 + (size := int.from_bytes(waiting[:4], "little")):
            body, waiting = waiting[4 : 4 + size], waiting[4 + size :]
            yield msgpack.unpackb(body)


def read_stats(fields: dict[str, Any], publish_s: float) -> PublisherStats:
    """The figures that the process has sent. publish_s: that the caller of `publish` has waited."""
    server = ServerStats(**fields.pop("server"))
    return PublisherStats(**{**fields, "publish_s": publish_s}, server=server)


def has_shared_memory() -> bool:
    """Whether this system has what a process of its own needs."""
    return hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
