"""Values of columns as JSON values that a message can carry.

In: what json, pyarrow or datasets gave. Out: the same as None, bool, int, float, str, list, dict.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.messages import Json

_INTEGERS = range(-(1 << 63), 1 << 64)


class NotJsonError(Exception):
    """A value that has no JSON form; the message goes on after the column's name."""


def json_value(value: object) -> Json:
    """`value` in JSON: dates as ISO text, bytes as base64, exact decimals as text, NaN as None.

    Raises NotJsonError.
    """
    for kinds, convert in _CONVERTERS:
        if isinstance(value, kinds):
            return convert(value)
    raise NotJsonError(f"holds a {type(value).__name__}, which has no JSON form: convert or remove it")


def _unchanged(value: Any) -> Json:
    return value  # type: ignore[no-any-return]


def _text(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotJsonError("holds text that is not valid Unicode (half of a surrogate pair): mend it") from error
    return value


def _integer(value: int) -> int:
    if value not in _INTEGERS:
        raise NotJsonError("holds an integer of more than 64 bits: write it as text")
    return value


def _from_numpy(value: np.generic | npt.NDArray[Any]) -> Json:
    if value.dtype.kind in "mM":  # finer than a microsecond Python has no date for
        value = value.astype(f"{value.dtype.kind}8[us]")
    return json_value(value.tolist())


# In order: bool is an int, numpy's float64 is a float, a datetime is a date.
_CONVERTERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Json]], ...] = (
    ((bool, type(None)), _unchanged),
    (str, lambda value: _text(str(value))),
    (int, _integer),
    (float, lambda value: float(value) if math.isfinite(value) else None),
    (dict, lambda value: {_text(str(key)): json_value(item) for key, item in value.items()}),
    ((list, tuple), lambda value: [json_value(item) for item in value]),
    ((np.generic, np.ndarray), _from_numpy),
    ((datetime.date, datetime.time), lambda value: value.isoformat()),
    (datetime.timedelta, lambda value: value.total_seconds()),
    ((decimal.Decimal, uuid.UUID), str),
    ((bytes, bytearray, memoryview), lambda value: base64.b64encode(value).decode("ascii")),
)
