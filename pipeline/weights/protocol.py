"""The header that every message of the weight channel starts with.

In: what a peer wants to say. Out: 64 bytes, and back. A header that does not parse is None, never
an exception: peers may send anything. docs/protocol.md gives the table of fields.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"RSW2"
NOTHING = -1  # as a version: before the first one
MAX_IN_FLIGHT = 256  # requests of one subscriber that are not answered yet
MAX_MANIFEST_BYTES = 128 * 1024 * 1024
MAX_VERSION = 2**63 - 1
NO_ROOT = bytes(16)
NO_SESSION = bytes(16)
WANTS_PATCHES = 1  # as the index of GET_MANIFEST

_LAYOUT = struct.Struct("<4sBBHQqII16s16s")
HEADER_BYTES = _LAYOUT.size


class Kind(IntEnum):
    """What a message is. Below 16: from subscriber to publisher."""

    GET_MANIFEST = 1
    GET_TILE = 2
    DONE = 3
    GET_PARCEL = 4
    ANNOUNCE = 16
    CURRENT = 17
    MANIFEST = 18
    TILE = 19
    ERROR = 20
    PATCHES = 21
    PARCEL = 22


NUM_PAYLOADS = {Kind.MANIFEST: 1, Kind.TILE: 1, Kind.PATCHES: 2, Kind.PARCEL: 1}  # frames after the header


class ErrorCode(IntEnum):
    """Why a request was not served."""

    NONE = 0
    GONE = 1
    NO_SUCH_TILE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First frame of a message.

    kind: what it is. request: chosen by the subscriber, repeated in the answer. version: weight
    version, or NOTHING. index: tile or parcel. root: hash of the manifest, or of the patch table, that is
    meant. session: of the publisher.
    """

    kind: Kind
    request: int = 0
    version: int = NOTHING
    index: int = 0
    root: bytes = NO_ROOT
    session: bytes = NO_SESSION
    code: ErrorCode = ErrorCode.NONE

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _LAYOUT.pack(
            MAGIC, self.kind, self.code, 0, self.request, self.version, self.index, 0, self.root, self.session
        )

    @classmethod
    def parse(cls, frame: bytes) -> Header | None:
        """The header in `frame`, or None where it is not one."""
        if len(frame) != HEADER_BYTES:
            return None
        magic, kind, code, zero, request, version, index, zeros, root, session = _LAYOUT.unpack(frame)
        if magic != MAGIC or zero or zeros or version < NOTHING:
            return None
        if kind not in _KINDS or code not in _CODES:
            return None
        return cls(
            kind=Kind(kind),
            request=request,
            version=version,
            index=index,
            root=root,
            session=session,
            code=ErrorCode(code),
        )


_KINDS = frozenset(Kind)
_CODES = frozenset(ErrorCode)
