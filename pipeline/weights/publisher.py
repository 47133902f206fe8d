"""Publishing weights: one copy, and the caller goes on.

In: weight states under ever higher versions. Out: addresses where subscribers find them. What was
published is never changed, and never withdrawn while its transfer is under way, within `keep`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import cast

import zmq

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError, WeightError
from pipeline.weights.codec import Encoder, WeightObject
from pipeline.weights.manifest import Manifest, TensorEntry
from pipeline.weights.patches import PatchSet
from pipeline.weights.protocol import MAX_IN_FLIGHT
from pipeline.weights.security import Doorkeeper, Signer, publisher_keys
from pipeline.weights.server import ANNOUNCE, LOOK_AGAIN, ServerStats, TileServer
from pipeline.weights.shelf import Shelf
from pipeline.weights.state import Endpoints, WeightKind, WeightState

_MAX_REQUEST_BYTES = 4096  # a frame of a peer; handshakes are the largest
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 20_000
_INBOX = "inproc://inbox"
_WILDCARDS = {"*", "0.0.0.0", "::"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStats:
    """num_versions: published. num_held: of these, in memory. num_receivers: transfers under way.

    publish_s: seconds spent in `publish`, all told. encode_s: hashing and comparing versions, wherever
    that was done. server: what was sent. num_failures: attempts to write a version into a store.
    num_put_back: files there that were gone, or not what was written.
    """

    num_versions: int
    num_held: int
    num_receivers: int
    publish_s: float
    server: ServerStats
    encode_s: float = 0.0
    num_failures: int = 0
    num_put_back: int = 0


class WeightPublisher:
    """Serves weight objects from a thread of its own. `publish` may be called from any thread.

    keep: versions held at most, 2 or more; older ones only while someone receives them.
    """

    def __init__(self, settings: WeightSettings, *, keep: int = 2) -> None:
        if settings.store:
            raise ConfigError(
                f"weights.store = {settings.store!r}, and WeightPublisher sends over ZeroMQ: "
                "pipeline.weights.create_publisher makes the publisher of either channel"
            )
        session = uuid.uuid4()
        self._keys = publisher_keys(settings)
        self._signer = Signer.load(settings.shared_key_file)
        self._settings = settings
        self._session = session
        self._shelf = Shelf(keep=keep)
        self._encoder = Encoder(session=session.bytes, tile_bytes=settings.tile_bytes)
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._wake = self._socket(zmq.PUSH)
        self._server: TileServer | None = None
        self._thread: threading.Thread | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._stop = threading.Event()
        self._publishing = threading.Lock()
        self._num_versions = 0
        self._publish_s = 0.0

    def start(self) -> Endpoints:
        """Bind and serve. Raises ConfigError: port in use, an address that is not this machine's."""
        assert self._thread is None, "started twice"
        settings = self._settings
        advertised = settings.advertise or settings.host
        if advertised in _WILDCARDS:
            raise ConfigError(
                f"weights.host = {settings.host!r} is no address that generators can connect to: "
                "set weights.advertise to the name or address of this machine"
            )
        keys = self._keys
        if settings.allowed_keys:
            self._doorkeeper = Doorkeeper(self._context, settings.allowed_keys)
        router, announcer, inbox = self._socket(zmq.ROUTER), self._socket(zmq.PUB), self._socket(zmq.PULL)
        router.router_mandatory = True  # an answer to someone who has gone is an error, to be counted
        router.router_handover = True  # a receiver that connects anew is the same one, with the same claim
        for socket in (router, announcer):
            socket.maxmsgsize = _MAX_REQUEST_BYTES
            if keys is not None:
                keys.protect(socket)
        tiles_port = _bind(router, settings.host, settings.port, "weights.port")
        announce_port = _bind(announcer, settings.host, settings.announce_port, "weights.announce_port")
        inbox.bind(_INBOX)
        self._wake.connect(_INBOX)
        self._server = TileServer(
            self._shelf,
            router=router,
            announcer=announcer,
            inbox=inbox,
            session=self._session.bytes,
            interval_s=settings.poll_s,
            signer=self._signer,
        )
        self._thread = threading.Thread(
            target=self._server.run, args=(self._stop,), name="weight-publisher", daemon=True
        )
        self._thread.start()
        return Endpoints(
            announce=f"tcp://{_bracketed(advertised)}:{announce_port}",
            tiles=f"tcp://{_bracketed(advertised)}:{tiles_port}",
            session=self._session.hex,
            public_key="" if keys is None else keys.public,
        )

    def publish(self, state: WeightState) -> Manifest:
        """Copy `state` to host memory and offer it; returns without waiting for any receiver.

        The caller may change its tensors as soon as this returns. Raises WeightError: a version
        that is not higher than the last, or tensors that contradict their dtype and shape.
        """
        return self._offer(state.weight_version, lambda: self._encoder.encode(state))

    def publish_content(
        self, weight_version: int, kind: WeightKind, table: tuple[TensorEntry, ...], content: memoryview
    ) -> Manifest:
        """The same without a copy: `content` is laid out as `table` says, and stays as it is while it is held."""
        tiles = tuple(
            content[start : start + self._settings.tile_bytes]
            for start in range(0, len(content), self._settings.tile_bytes)
        )
        return self._offer(weight_version, lambda: self._encoder.seal(weight_version, kind, table, tiles))

    def _offer(self, weight_version: int, make: Callable[[], WeightObject]) -> Manifest:
        with self._publishing:
            if self._thread is not None and not self._thread.is_alive():
                raise WeightError("the thread that serves weights has ended; nobody would receive this version")
            started = time.perf_counter()
            self._shelf.check(weight_version)
            item = make()
            self._shelf.put(item, self._patches_to(item))
            self._num_versions += 1
            self._publish_s += time.perf_counter() - started
            self._notify(ANNOUNCE)
        return item.manifest

    def pass_on(self, session: bytes, item: WeightObject, patches: PatchSet | None) -> None:
        """Offer what another publisher has made, of which pieces are still to come. session: of that publisher."""
        with self._publishing:
            if self._server is not None:
                self._server.session = session
            self._shelf.put(item, patches)
            self._num_versions += 1
            self._notify(ANNOUNCE)

    def speak_for(self, session: bytes) -> None:
        """Answer in the name of that publisher, unless something of another one is already offered.

        NO_SESSION: answer nobody until it is known in whose name.
        """
        with self._publishing:
            if self._server is not None and self._shelf.newest() is None:
                self._server.session = session
                self._notify(LOOK_AGAIN)

    def note_pieces(self) -> None:
        """More of what is passed on has come."""
        if self._server is not None and self._server.has_waiting:
            with self._publishing:
                self._notify(LOOK_AGAIN)

    def withdraw(self, weight_version: int) -> None:
        """What was passed on will never be complete."""
        with self._publishing:
            self._shelf.withdraw(weight_version)
            self._notify(LOOK_AGAIN)

    def _patches_to(self, item: WeightObject) -> PatchSet | None:
        """From the version before, where someone may want them and they weigh less."""
        base = self._shelf.newest()
        is_wanted = self._settings.encoding != "snapshot" and self._shelf.are_patches_wanted
        return self._encoder.compare(base, item) if base is not None and is_wanted else None

    @property
    def is_serving(self) -> bool:
        """Whether the thread that serves is there."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def stats(self) -> PublisherStats:
        """Figures since the start."""
        return PublisherStats(
            num_versions=self._num_versions,
            num_held=self._shelf.num_objects,
            num_receivers=self._shelf.num_receivers,
            publish_s=self._publish_s,
            encode_s=self._publish_s,
            server=ServerStats() if self._server is None else replace(self._server.stats),
        )

    def close(self) -> None:
        """Stop serving and free everything. Safe to call twice."""
        with self._publishing:
            if self._context.closed:
                return
            self._stop.set()
            self._notify(LOOK_AGAIN)
            if self._thread is not None:
                self._thread.join()
            for socket in self._sockets:
                socket.close(linger=0)
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            self._context.term()
            self._encoder.close()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _notify(self, what: bytes) -> None:
        # A full inbox is as good as a notice: the server wakes up for what is in it.
        if self._thread is not None:
            with contextlib.suppress(zmq.Again):
                self._wake.send(what, zmq.NOBLOCK)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = ":" in self._settings.host
        socket.sndhwm = MAX_IN_FLIGHT
        socket.heartbeat_ivl = _HEARTBEAT_MS  # frees the queue of a receiver that is gone or frozen
        socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        self._sockets.append(socket)
        return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bind(socket: zmq.Socket[bytes], host: str, port: int, setting: str) -> int:
    """The port that was bound; `port` or, for 0, a free one."""
    numeric = "127.0.0.1" if host == "localhost" else host
    try:
        socket.bind(f"tcp://{_bracketed(numeric)}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(f"{setting} = {port} is in use on {host}: choose another port, or 0 for any") from error
        raise ConfigError(f"weights.host = {host!r}, {setting} = {port} cannot be bound: {error.strerror}") from error
    address = cast(bytes, socket.last_endpoint).rstrip(b"\0")
    return int(address.rsplit(b":", 1)[1])
