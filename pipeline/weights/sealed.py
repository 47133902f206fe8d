"""A msgpack map under the hash of its own bytes: how manifests, patch tables and pointers are written.

In: fields. Out: bytes, and from bytes of unknown origin the fields, or a WeightError that says what is
wrong with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgpack
import xxhash

from pipeline.errors import WeightError

HASH_BYTES = 16

_Read = TypeVar("_Read")


def digest(data: bytes | memoryview) -> bytes:
    """xxh3-128, big-endian. Releases the GIL for all but small inputs."""
    return xxhash.xxh3_128_digest(data)


def seal(fields: Mapping[str, Any]) -> bytes:
    """The hash of the map, then the map."""
    body: bytes = msgpack.packb(fields)
    return digest(body) + body


def unseal(
    payload: bytes | memoryview,
    read: Callable[[dict[str, Any], bytes], _Read],
    *,
    what: str,
    names: Collection[str],
    schema: int,
    max_bytes: int,
) -> _Read:
    """What `read(fields, hash)` makes of a map that was sealed and has exactly the fields `names`.

    read: may raise what malformed values make it raise. what: for the message. Raises WeightError.
    """
    if not HASH_BYTES < len(payload) <= max_bytes:
        raise WeightError(f"{what} of {len(payload)} bytes, where {HASH_BYTES + 1} to {max_bytes} are possible")
    identity, body = bytes(payload[:HASH_BYTES]), payload[HASH_BYTES:]
    if digest(body) != identity:
        raise WeightError(f"{what} does not have the hash that it claims")
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=True)
        if not isinstance(fields, dict) or set(fields) != set(names):
            raise WeightError(f"{what} does not have the fields that it must have")
        if fields["schema"] != schema:
            raise WeightError(f"{what} is of schema {fields['schema']!r}; {schema} is what can be read here")
        return read(fields, identity)
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
        raise WeightError(f"{what} is malformed: {type(error).__name__}: {error}") from error
