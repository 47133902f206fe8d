"""The serving side: answers requests, announces versions, never waits for a receiver.

In: a shelf of weight objects and a wake-up whenever one was added, or a piece of one. Out: announcements on PUB, and
manifests and tiles on ROUTER. Runs in one thread, which alone touches its sockets. Whatever a
peer sends is answered, or counted and ignored.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import zmq

from pipeline.weights.codec import WeightObject
from pipeline.weights.folding import Folding
from pipeline.weights.protocol import NO_SESSION, NOTHING, WANTS_PATCHES, ErrorCode, Header, Kind
from pipeline.weights.security import Signer
from pipeline.weights.shelf import Shelf

ANNOUNCE, LOOK_AGAIN = b"a", b""  # into the inbox: a new version, or new pieces of one
# Not those without detail: so ends also a peer that goes away in the middle of its handshake.
_FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_TURN = 64  # requests served before announcements get a look in
_MAX_WAITING = 65_536  # requests for what has not come: 256 that may be under way of each of 256 receivers
_MAX_BEGUN = 4096  # receivers that are remembered; the oldest of more have gone without a word


@dataclass(slots=True, kw_only=True)
class ServerStats:
    """What was sent, and what was not.

    num_tiles, num_manifests, num_parcels, num_patch_tables, num_announcements, num_bytes: sent.
    num_transfers: versions that a receiver has got whole, transfer_s of it from the first answer to its
    last word. num_gone: asked for, no longer held. num_malformed: messages that are none. num_unsigned: of
    these, such as lack only the signature. num_undelivered: answers whose receiver has gone or does not
    read, and requests that waited and were given up. num_turned_away: connections that ended in the
    handshake, for want of the right key or of ZeroMQ.
    """

    num_tiles: int = 0
    num_manifests: int = 0
    num_parcels: int = 0
    num_patch_tables: int = 0
    num_announcements: int = 0
    num_bytes: int = 0
    num_transfers: int = 0
    transfer_s: float = 0.0
    num_gone: int = 0
    num_malformed: int = 0
    num_unsigned: int = 0
    num_undelivered: int = 0
    num_turned_away: int = 0

    @property
    def unwelcome(self) -> dict[str, int]:
        """What came and got nothing, by reason."""
        malformed = self.num_malformed - self.num_unsigned
        return {"handshake": self.num_turned_away, "unsigned": self.num_unsigned, "malformed": malformed}


_Piece = TypeVar("_Piece", bytes, memoryview)


class TileServer:
    """Loop over the sockets.

    inbox: PULL, from the publishing thread. session: may be set anew. interval_s: announcements are
    repeated this often. signer: writes and reads headers.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        router: zmq.Socket[bytes],
        announcer: zmq.Socket[bytes],
        inbox: zmq.Socket[bytes],
        session: bytes,
        interval_s: float,
        signer: Signer,
    ) -> None:
        self.stats = ServerStats()
        self._shelf = shelf
        self._folding = Folding(shelf)
        self._router = router
        self._announcer = announcer
        self._waiting: dict[tuple[bytes, Kind, int, bytes], Header] = {}  # by who asks for what: once, however often
        self._begun: OrderedDict[bytes, float] = OrderedDict()  # receiver -> when it was told what to fetch
        self._inbox = inbox
        self.session = session
        self._interval_s = interval_s
        self._signer = signer
        self._handshakes = router.get_monitor_socket(_FAILED_HANDSHAKES)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set and the inbox wakes the loop."""
        try:
            self._serve_until(stop)
        finally:
            self._router.disable_monitor()
            self._handshakes.close(linger=0)

    def _serve_until(self, stop: threading.Event) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._handshakes, zmq.POLLIN)
        next_announcement = time.monotonic()
        while not stop.is_set():
            wait_s = 0.0 if self._folding.is_under_way else max(0.0, next_announcement - time.monotonic())
            ready = dict(poller.poll(math.ceil(wait_s * 1000)))
            if self._inbox in ready:
                if self._inbox.recv() == ANNOUNCE:
                    next_announcement = time.monotonic()
                self._serve_waiting()
            if time.monotonic() >= next_announcement:
                self._announce()
                next_announcement = time.monotonic() + self._interval_s
            if self._router in ready:
                self._serve_turn()
            if self._handshakes in ready:
                self._handshakes.recv_multipart()
                self.stats.num_turned_away += 1
            for peer, request, is_there in self._folding.go_on():
                (self._serve_manifest if is_there else self._serve_snapshot)(peer, request)

    def _announce(self) -> None:
        self._shelf.sweep()
        newest = self._shelf.newest()
        if newest is None:
            return
        version, root = newest.manifest.weight_version, newest.manifest.root
        header = Header(kind=Kind.ANNOUNCE, version=version, root=root, session=self.session)
        self._announcer.send(self._signer.write(header))
        self.stats.num_announcements += 1

    def _serve_turn(self) -> None:
        for _ in range(_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            request = self._signer.read(frames[1]) if len(frames) == 2 else None
            if request is None:
                self._count_unread()
                continue
            self._serve(frames[0], request)

    def _count_unread(self) -> None:
        self.stats.num_malformed += 1
        self.stats.num_unsigned = self._signer.num_unsigned

    def _serve(self, peer: bytes, request: Header) -> None:
        if self.session == NO_SESSION:
            self._wait(peer, request)
            return
        match request.kind:
            case Kind.GET_MANIFEST:
                self._serve_manifest(peer, request)
            case Kind.GET_TILE:
                self._serve_tile(peer, request)
            case Kind.GET_PARCEL:
                self._serve_parcel(peer, request)
            case Kind.DONE:
                self._shelf.end_transfer(peer)
                self._count_transfer(peer)
            case _:
                self.stats.num_malformed += 1

    def _serve_manifest(self, peer: bytes, request: Header) -> None:
        wants_patches = request.index == WANTS_PATCHES
        self._shelf.note_wish(peer, wants_patches=wants_patches)
        way = self._shelf.way_to_newest(request.version, request.root) if wants_patches else None
        if way is None:
            self._serve_snapshot(peer, request)
        elif len(way.steps) > 1:
            self._folding.ask(way, peer, request)
        else:
            answer = _about(way.newest, request, Kind.PATCHES)
            self.stats.num_patch_tables += self._send(peer, answer, way.newest.payload, way.steps[0].payload)
            self._begin_transfer(peer)

    def _serve_snapshot(self, peer: bytes, request: Header) -> None:
        item = self._shelf.start_transfer(peer, request.version)
        if item is not None:
            self.stats.num_manifests += self._send(peer, _about(item, request, Kind.MANIFEST), item.payload)
            self._begin_transfer(peer)
            return
        newest = self._shelf.newest()
        version = NOTHING if newest is None else newest.manifest.weight_version
        self._send(peer, replace(request, kind=Kind.CURRENT, version=version))

    def _begin_transfer(self, peer: bytes) -> None:
        self._begun[peer] = time.monotonic()
        self._begun.move_to_end(peer)
        if len(self._begun) > _MAX_BEGUN:
            self._begun.popitem(last=False)

    def _count_transfer(self, peer: bytes) -> None:
        begun_at = self._begun.pop(peer, None)
        if begun_at is not None:
            self.stats.num_transfers += 1
            self.stats.transfer_s += time.monotonic() - begun_at

    def _serve_tile(self, peer: bytes, request: Header) -> None:
        item = self._shelf.find(peer, request.version, request.root)
        self.stats.num_tiles += self._serve_piece(peer, request, Kind.TILE, None if item is None else item.tiles)

    def _serve_parcel(self, peer: bytes, request: Header) -> None:
        patches = self._shelf.find_patches(request.root)
        parcels = None if patches is None else patches.parcels
        self.stats.num_parcels += self._serve_piece(peer, request, Kind.PARCEL, parcels)

    def _serve_piece(self, peer: bytes, request: Header, kind: Kind, pieces: Sequence[_Piece | None] | None) -> bool:
        """Whether it is on its way. pieces: None where they are no longer held."""
        if pieces is None:
            self.stats.num_gone += 1
            self._send(peer, replace(request, kind=Kind.ERROR, code=ErrorCode.GONE))
            return False
        if request.index >= len(pieces):
            self.stats.num_malformed += 1
            self._send(peer, replace(request, kind=Kind.ERROR, code=ErrorCode.NO_SUCH_TILE))
            return False
        piece = self._awaited(pieces, peer, request)
        return piece is not None and self._send(peer, replace(request, kind=kind), piece)

    def _awaited(self, pieces: Sequence[_Piece | None], peer: bytes, request: Header) -> _Piece | None:
        """The piece that is asked for; None where the request has to wait for it."""
        # Who brings pieces looks for waiting requests after each: this one must be seen before the last look.
        self._wait(peer, request)
        piece = pieces[request.index]
        if piece is not None:
            del self._waiting[_wish(peer, request)]
        return piece

    def _wait(self, peer: bytes, request: Header) -> None:
        """Answer it later. Of too many the earliest is given up: who has sent it will ask again."""
        self._waiting[_wish(peer, request)] = request
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self.stats.num_undelivered += 1

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits for a piece that has not come yet."""
        return bool(self._waiting)

    def _serve_waiting(self) -> None:
        """Answer what has come in the meantime, or is gone; the rest waits on."""
        waiting, self._waiting = self._waiting, {}
        for (peer, *_), request in waiting.items():
            self._serve(peer, request)

    def _send(self, peer: bytes, answer: Header, *payload: bytes | memoryview) -> bool:
        """Whether it is on its way. False: the receiver is gone or its queue is full; it will ask again."""
        header = self._signer.write(replace(answer, session=self.session))
        try:
            self._router.send_multipart([peer, header, *payload], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                raise
            self.stats.num_undelivered += 1
            return False
        self.stats.num_bytes += sum(len(part) for part in payload)
        return True


def _wish(peer: bytes, request: Header) -> tuple[bytes, Kind, int, bytes]:
    """What is asked for, and by whom: who asks again has given the earlier request up."""
    return peer, request.kind, request.index, request.root


def _about(item: WeightObject, request: Header, kind: Kind) -> Header:
    """An answer that names this object."""
    return replace(request, kind=kind, version=item.manifest.weight_version, root=item.manifest.root)
