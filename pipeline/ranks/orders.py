"""What rank 0 tells the others to do.

In: an order. Out: its bytes, and an order from bytes. The groups of a step follow it, one message each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum


class Work(StrEnum):
    """What all ranks do together."""

    BUILD = "build"
    STEP = "step"
    EXPORT = "export"
    SNAPSHOT = "snapshot"
    STATE = "state"
    MODEL = "model"
    LOAD = "load"
    LEAVE_DEVICE = "leave_device"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """work: to do. version: the trainer's, for a step. num_groups: that follow."""

    work: Work
    version: int = 0
    num_groups: int = 0

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Order:
        """What `encode` gave."""
        fields = json.loads(message)
        return cls(work=Work(fields["work"]), version=int(fields["version"]), num_groups=int(fields["num_groups"]))
