"""What a receiver of weights waits for, and what it has had."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What a subscriber waits for."""

    ADDRESS = "address of the weight publisher"
    PUBLISHER = "answer of the weight publisher"
    VERSION = "newer weights"
    TILES = "tiles"
    NEIGHBOUR = "the generator of this machine that receives weights"


@dataclass(slots=True, kw_only=True)
class SubscriberStats:
    """Figures since the start.

    phase: what it waits for now. num_patched: of the versions, those of which only what changed was
    sent, num_mapped those that another process of this machine has received. num_bytes: of the
    versions, num_received_bytes: sent for them. receive_s: from manifest to last piece, verify_s of it
    hashing, copying and patching. num_skipped: versions that were overtaken.
    num_missed_announcements: versions learnt by polling. num_silences: connections given up.
    num_moves: publishers that were found elsewhere. num_resumed_tiles: kept over both.
    num_lost_tiles: ordered and not answered. num_refused: manifests or objects that failed
    verification. num_ignored: malformed messages.
    """

    phase: Phase = Phase.ADDRESS
    num_versions: int = 0
    num_patched: int = 0
    num_mapped: int = 0
    num_skipped: int = 0
    num_bytes: int = 0
    num_received_bytes: int = 0
    receive_s: float = 0.0
    verify_s: float = 0.0
    num_corrupt_tiles: int = 0
    num_lost_tiles: int = 0
    num_resumed_tiles: int = 0
    num_missed_announcements: int = 0
    num_silences: int = 0
    num_moves: int = 0
    num_refused: int = 0
    num_ignored: int = 0
