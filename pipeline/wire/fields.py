"""Single fields of a message that has arrived, each checked before it is used.

In: bytes, and what msgpack makes of them. Out: values of the type and range that were asked for, or
MessageError that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import MessageError

Fields = Mapping[str, Any]
_Item = TypeVar("_Item")


def unpack(payload: bytes) -> Fields:
    """The map that msgpack makes of it. Raises MessageError."""
    try:
        value = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise MessageError(f"expected a map, got {type(value).__name__}")
    return value


def require(condition: bool, problem: str) -> None:
    """Raises MessageError where the condition does not hold."""
    if not condition:
        raise MessageError(problem)


# Texts of problems are only made where there is one: reading is on the way of every group.


def typed(value: object, kind: type[_Item], name: str) -> _Item:
    """The value, of this type."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MessageError(f"{name} is {type(value).__name__}, expected {kind.__name__}")
    return value


def natural(fields: Fields, name: str) -> int:
    """A field that counts something."""
    value = typed(fields[name], int, name)
    if not 0 <= value < 1 << 63:
        raise MessageError(f"{name} = {value} is out of range")
    return value


def number(value: object, name: str) -> float:
    """The value as a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MessageError(f"{name} is {type(value).__name__}, expected a number")
    if not math.isfinite(value):
        raise MessageError(f"{name} = {value} is not finite")
    return float(value)


def list_of(fields: Fields, name: str) -> list[Any]:
    """A field that is a list."""
    return typed(fields[name], list, name)


def array_of(value: object, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """The array whose elements the bytes are."""
    data = typed(value, bytes, name)
    if len(data) % dtype.itemsize:
        raise MessageError(f"{name} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)
