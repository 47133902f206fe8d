"""A subscriber's two sockets to one publisher.

In: requests. Out: answers and announcements of that publisher. What does not parse, or comes from
another session than the one resolved, is counted and never seen by anyone else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
import zmq.asyncio

from pipeline.config import WeightSettings
from pipeline.errors import WeightError
from pipeline.weights.protocol import (
    MAGIC,
    MAX_MANIFEST_BYTES,
    NO_ROOT,
    NO_SESSION,
    NOTHING,
    NUM_PAYLOADS,
    Header,
    Kind,
)
from pipeline.weights.security import KeyPair, Signer, use_public_key
from pipeline.weights.state import Endpoints

_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 20_000
_MAX_RECONNECT_MS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What the publisher sent. payloads: views of ZeroMQ's own memory, as many as the kind has."""

    header: Header
    payloads: tuple[memoryview, ...]

    @property
    def payload(self) -> memoryview:
        """The first; empty without one."""
        return self.payloads[0] if self.payloads else memoryview(b"")


class Link:
    """Connected on construction, in the sense of ZeroMQ: it delivers as soon as there is someone.

    Raises WeightError where address, key or session are none. endpoints.session: empty accepts any.
    receiver: whom the publisher serves, the same on all connections of a subscriber. numbers: of its
    requests, ascending over all of them, so that no late answer is taken for another's. signer: writes
    and reads headers. keys: the subscriber's own, where it has some.
    announced: highest version that an announcement has named. num_ignored: messages that were
    malformed or of another session. is_foreign: whether one had no header that could be read.
    is_other: whether one was of another session. num_behind: answers in a row that name an older version
    than was asked for.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoints: Endpoints,
        settings: WeightSettings,
        *,
        receiver: bytes,
        numbers: Iterator[int],
        signer: Signer,
        keys: KeyPair | None,
    ) -> None:
        self.endpoints = endpoints
        self.session = _session_of(endpoints)
        self.announced = NOTHING
        self.num_ignored = 0
        self.is_foreign = False
        self.is_other = False
        self.num_behind = 0
        self._numbers = numbers
        self._signer = signer
        public_key = settings.server_public_key or endpoints.public_key
        self._dealer, self._subscriber = _socket(context, zmq.DEALER), _socket(context, zmq.SUB)
        self._dealer.routing_id = receiver
        self._subscriber.conflate = True  # only the newest announcement matters
        self._subscriber.subscribe(MAGIC)
        try:
            for socket, address in ((self._dealer, endpoints.tiles), (self._subscriber, endpoints.announce)):
                if public_key:
                    use_public_key(socket, public_key, keys)
                socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise WeightError(f"{endpoints} cannot be connected to: {error.strerror}") from error

    async def request(self, kind: Kind, *, version: int, index: int = 0, root: bytes = NO_ROOT) -> int:
        """Send a request and return its number."""
        number = next(self._numbers)
        header = Header(kind=kind, request=number, version=version, index=index, root=root)
        await self._dealer.send(self._signer.write(header))
        return number

    async def answer(self, timeout_s: float) -> Answer | None:
        """The next answer, or None after `timeout_s` without any."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    first, *rest = await self._dealer.recv_multipart(copy=False)
                    header = self._accepted(first.bytes)
                    if header is not None and len(rest) == NUM_PAYLOADS.get(header.kind, 0):
                        return Answer(header=header, payloads=tuple(frame.buffer for frame in rest))
                    self.num_ignored += 1
                    await asyncio.sleep(0)  # a flood of nonsense must not hold up the event loop
        except TimeoutError:
            return None

    async def wait_for_announcement(self, newer_than: int, timeout_s: float) -> None:
        """Return when a version above `newer_than` is announced, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.announced <= newer_than:
                    self._note(await self._subscriber.recv())
        except TimeoutError:
            return

    async def note_announcements(self) -> None:
        """Bring `announced` up to date without waiting."""
        while await self._subscriber.poll(0):
            self._note(await self._subscriber.recv())

    def close(self) -> None:
        """Drop the connection and what is queued on it."""
        self._dealer.close(linger=0)
        self._subscriber.close(linger=0)

    def _note(self, frame: bytes) -> None:
        header = self._accepted(frame)
        if header is None or header.kind is not Kind.ANNOUNCE:
            self.num_ignored += 1
            return
        self.announced = max(self.announced, header.version)

    def _accepted(self, frame: bytes) -> Header | None:
        header = self._signer.read(frame)
        self.is_foreign |= header is None
        if header is None or self.session not in {NO_SESSION, header.session}:
            self.is_other |= header is not None
            return None
        return header


def _session_of(endpoints: Endpoints) -> bytes:
    """NO_SESSION for an empty one. Raises WeightError."""
    try:
        session = bytes.fromhex(endpoints.session) or NO_SESSION
    except ValueError:
        session = b""
    if len(session) != len(NO_SESSION):
        raise WeightError(f"{endpoints}: a session is {2 * len(NO_SESSION)} hexadecimal digits, or empty for any")
    return session


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = True
    socket.maxmsgsize = MAX_MANIFEST_BYTES
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
    socket.reconnect_ivl_max = _MAX_RECONNECT_MS
    return socket
