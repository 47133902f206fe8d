"""The files of a version and their content.

In: a weight object, and the patches that lead to it. Out: names and bytes, as docs/protocol.md has them; nothing
is copied, and nothing written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.weights.codec import WeightObject
from pipeline.weights.patches import PatchSet
from pipeline.weights.store.pointer import Pieces, manifest_name, parcel_pieces, table_name, tile_pieces

File = tuple[str, Sequence[bytes | memoryview]]


def snapshot_files(item: WeightObject, file_bytes: int) -> Iterator[File]:
    """Manifest and tiles."""
    manifest = item.manifest
    yield manifest_name(manifest.weight_version, manifest.root), [item.payload]
    yield from _gathered(tile_pieces(manifest, file_bytes), item.tiles)


def patch_files(item: WeightObject, patches: PatchSet, file_bytes: int) -> Iterator[File]:
    """Table and parcels of the step to `item`."""
    version = item.manifest.weight_version
    yield table_name(version, item.manifest.root), [patches.payload]
    yield from _gathered(parcel_pieces(version, patches.table, file_bytes), patches.parcels)


def _gathered(pieces: Pieces, content: Sequence[bytes | memoryview | None]) -> Iterator[File]:
    for file in range(pieces.num_files):
        if pieces.file_size(file):
            chosen = pieces.pieces_of(file)
            yield pieces.name(file), [part for part in content[chosen.start : chosen.stop] if part is not None]
