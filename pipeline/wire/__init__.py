"""Carriers as bytes, and bytes as carriers that can be trusted.

In: the carriers of `pipeline.messages`. Out: msgpack with arrays packed little-endian. A group
that moves on keeps the bytes of the hop before it nested. Reading validates everything a later
stage relies on; what fails raises `MessageError`.
"""

from pipeline.wire.reading import decode
from pipeline.wire.writing import encode

__all__ = ["decode", "encode"]
