"""What a subscriber tells of itself, whichever channel it reads.

In: what happens to it. Out: figures, for metrics and for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeline.weights.manifest import Manifest
from pipeline.weights.protocol import NOTHING


class Phase(StrEnum):
    """What a subscriber waits for."""

    ADDRESS = "address of the weight publisher"
    PUBLISHER = "answer of the weight publisher"
    VERSION = "newer weights"
    TILES = "tiles"
    STORE = "weight store"
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
    num_lost_tiles: ordered and not answered, or files that are gone or cannot be read. num_refused:
    manifests or objects that failed verification. num_ignored: malformed messages. newest: version
    that is there, or NOTHING.
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
    newest: int = NOTHING

    def arrived(
        self, manifest: Manifest, *, is_patched: bool, num_received_bytes: int, receive_s: float, verify_s: float
    ) -> None:
        """A version is there."""
        if self.newest != NOTHING:
            self.num_skipped += max(manifest.weight_version - self.newest - 1, 0)  # the same one may come again
        self.newest = manifest.weight_version
        self.num_versions += 1
        self.num_patched += is_patched
        self.num_bytes += manifest.num_bytes
        self.num_received_bytes += num_received_bytes
        self.receive_s += receive_s
        self.verify_s += verify_s
