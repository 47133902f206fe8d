"""Values of any library as JSON can hold them, for records and for the registry.

In: what a worker says of itself or measured. Out: plain values. Nothing is refused; columns of a data
set, of which nothing may be lost, are converted in `pipeline.prompts.values`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import SupportsFloat

from pipeline.messages import Json


def plain_json(value: object) -> Json:
    """Numbers become Python's, NaN and infinity null, what JSON has no form for its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else None
    return str(value)
