"""What turns one version into a later one: a patch for every tile, gathered in parcels.

In: patches in the order of the tiles. Out: a table that says how to apply them, with its own hash,
and parcels to send; and back. A parcel holds the patches of consecutive tiles: as many as fit into
one tile's bytes, so that small changes of a large model do not travel in thousands of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import WeightError
from pipeline.weights.delta import Method, Patch, fold_patches
from pipeline.weights.manifest import Manifest, tile_widths
from pipeline.weights.protocol import MAX_MANIFEST_BYTES, MAX_VERSION
from pipeline.weights.sealed import HASH_BYTES, digest, seal, unseal

SCHEMA = 1
_SLACK = 64  # bytes by which a patch may exceed its tile
_FIELDS = {
    "schema", "base_version", "base_root", "root", "encode_us", "methods", "lengths", "parcel_tiles", "parcel_hashes",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchTable:
    """How the parcels apply.

    base_version, base_root: the exact content they start from. root: of the manifest of the content
    that results. encode_s: seconds it took to make. methods, lengths: of each tile's patch.
    bounds: parcel i holds the patches of the tiles bounds[i] to bounds[i + 1]. parcel_hashes:
    xxh3-128 of each, end to end. identity: xxh3-128 of all of the above as encoded.
    """

    base_version: int
    base_root: bytes
    root: bytes
    encode_s: float
    methods: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.uint32]
    bounds: tuple[int, ...]
    parcel_hashes: bytes
    identity: bytes = b""

    @property
    def num_parcels(self) -> int:
        """Parcels, of which some may be empty."""
        return len(self.bounds) - 1

    def tiles_of(self, parcel: int) -> range:
        """Tiles that a parcel patches."""
        return range(self.bounds[parcel], self.bounds[parcel + 1])

    def parcel_size(self, parcel: int) -> int:
        """Bytes of a parcel."""
        return int(self.lengths[self.bounds[parcel] : self.bounds[parcel + 1]].sum(dtype=np.int64))

    def parcel_hash(self, parcel: int) -> bytes:
        """Hash that a parcel must have."""
        return self.parcel_hashes[parcel * HASH_BYTES : (parcel + 1) * HASH_BYTES]

    def is_parcel(self, parcel: int, data: memoryview) -> bool:
        """Whether these bytes are that parcel."""
        return len(data) == self.parcel_size(parcel) and digest(data) == self.parcel_hash(parcel)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchSet:
    """All that a receiver of the base needs. payload: the encoded table.

    A parcel is None as long as it has not come to who passes it on.
    """

    table: PatchTable
    payload: bytes
    parcels: Sequence[bytes | None]

    @property
    def num_bytes(self) -> int:
        """What is sent, the manifest aside."""
        return len(self.payload) + int(self.table.lengths.sum(dtype=np.int64))

    @property
    def is_complete(self) -> bool:
        """Whether every parcel is there."""
        return all(parcel is not None for parcel in self.parcels)

    def patches(self) -> list[Patch]:
        """The patch of each tile, of a complete set."""
        found = []
        for index, parcel in enumerate(self.parcels):
            assert parcel is not None
            found += split_parcel(self.table, index, memoryview(parcel))
        return found


def split_parcel(table: PatchTable, parcel: int, data: memoryview) -> list[Patch]:
    """The patches in a parcel of the right size."""
    tiles = table.tiles_of(parcel)
    ends = np.cumsum([0, *table.lengths[tiles.start : tiles.stop].tolist()]).tolist()
    methods = table.methods[tiles.start : tiles.stop].tolist()
    return [Patch(Method(how), data[start:end]) for how, (start, end) in zip(methods, pairwise(ends), strict=True)]


def gather(patches: Sequence[Patch], *, base: tuple[int, bytes], manifest: Manifest, encode_s: float) -> PatchSet:
    """Parcels and table of these patches, one for each tile of `manifest`. base: version and root."""
    lengths = np.array([len(patch.payload) for patch in patches], dtype="<u4")
    bounds = cuts(lengths.tolist(), manifest.tile_bytes)
    parcels = tuple(b"".join(patch.payload for patch in patches[start:stop]) for start, stop in pairwise(bounds))
    table = PatchTable(
        base_version=base[0],
        base_root=base[1],
        root=manifest.root,
        encode_s=encode_s,
        methods=np.array([patch.method for patch in patches], dtype=np.uint8),
        lengths=lengths,
        bounds=bounds,
        parcel_hashes=b"".join(digest(parcel) for parcel in parcels),
    )
    identity, payload = _encode_table(table)
    return PatchSet(table=replace(table, identity=identity), payload=payload, parcels=parcels)


class Fold:
    """The making of one set with the effect of consecutive ones, of which the last leads to `manifest`."""

    def __init__(self, chain: Sequence[PatchSet], manifest: Manifest) -> None:
        self._tables = [item.table for item in chain]
        self._tiles = enumerate(zip(*(item.patches() for item in chain), strict=True))
        self._manifest = manifest
        self._widths = tile_widths(manifest)
        self._folded: list[Patch] = []

    def go_on(self) -> PatchSet | None:
        """One tile more; the set when there is none left."""
        for index, patches in self._tiles:
            size, width = self._manifest.tile_size(index), self._widths[index]
            self._folded.append(reduce(lambda first, second: fold_patches(first, second, size, width), patches))
            return None
        base = self._tables[0].base_version, self._tables[0].base_root
        encode_s = sum(table.encode_s for table in self._tables)
        return gather(self._folded, base=base, manifest=self._manifest, encode_s=encode_s)


def fold(chain: Sequence[PatchSet], manifest: Manifest) -> PatchSet:
    """That set, at once."""
    work = Fold(chain, manifest)
    while (folded := work.go_on()) is None:
        pass
    return folded


def cuts(lengths: Sequence[int], limit: int) -> tuple[int, ...]:
    """Where to cut a row of things, so that as many as fit into `limit` lie between two cuts, and one at the least."""
    found, size = [0], 0
    for index, length in enumerate(lengths):
        if size and size + length > limit:
            found.append(index)
            size = 0
        size += length
    return (*found, len(lengths)) if lengths else (0,)


def _encode_table(table: PatchTable) -> tuple[bytes, bytes]:
    payload = seal(
        {
            "schema": SCHEMA,
            "base_version": table.base_version,
            "base_root": table.base_root,
            "root": table.root,
            "encode_us": round(table.encode_s * 1e6),
            "methods": table.methods.tobytes(),
            "lengths": table.lengths.tobytes(),
            "parcel_tiles": np.diff(np.array(table.bounds, dtype=np.int64)).astype("<u4").tobytes(),
            "parcel_hashes": table.parcel_hashes,
        }
    )
    return payload[:HASH_BYTES], payload


def decode_table(payload: bytes | memoryview, manifest: Manifest) -> PatchTable:
    """The table in `payload`, which leads to `manifest`. Raises WeightError saying what is wrong with it."""
    table = unseal(payload, _read, what="the patch table", names=_FIELDS, schema=SCHEMA, max_bytes=MAX_MANIFEST_BYTES)
    _check(table, manifest)
    return table


def _read(fields: dict[str, Any], identity: bytes) -> PatchTable:
    numbers = [fields[name] for name in ("base_version", "encode_us")]
    if any(type(value) is not int or not 0 <= value <= MAX_VERSION for value in numbers):
        raise ValueError(f"{numbers} are not numbers of 0 or more")
    for name in ("base_root", "root", "methods", "lengths", "parcel_tiles", "parcel_hashes"):
        if not isinstance(fields[name], bytes):
            raise TypeError(f"{name} is a {type(fields[name]).__name__} where bytes belong")
    tiles = np.frombuffer(fields["parcel_tiles"], dtype="<u4").astype(np.int64)
    return PatchTable(
        base_version=numbers[0],
        base_root=fields["base_root"],
        root=fields["root"],
        encode_s=numbers[1] / 1e6,
        methods=np.frombuffer(fields["methods"], dtype=np.uint8),
        lengths=np.frombuffer(fields["lengths"], dtype="<u4"),
        bounds=(0, *np.cumsum(tiles).tolist()),
        parcel_hashes=fields["parcel_hashes"],
        identity=identity,
    )


def _check(table: PatchTable, manifest: Manifest) -> None:
    """Raises WeightError unless the table covers exactly the tiles of the manifest, in sane parcels."""
    if table.root != manifest.root or len(table.base_root) != HASH_BYTES:
        raise WeightError("the patch table does not lead to the manifest that came with it")
    if not len(table.methods) == len(table.lengths) == table.bounds[-1] == manifest.num_tiles:
        raise WeightError(f"the patch table is not one of {manifest.num_tiles} tiles")
    if any(start >= stop for start, stop in pairwise(table.bounds)):
        raise WeightError("the patch table has a parcel without tiles")
    if len(table.parcel_hashes) != table.num_parcels * HASH_BYTES:
        raise WeightError(f"{len(table.parcel_hashes)} bytes of hashes for {table.num_parcels} parcels")
    if table.methods.size and int(table.methods.max()) > max(Method):
        raise WeightError(f"a patch is made by method {int(table.methods.max())}")
    sizes = np.full(manifest.num_tiles, manifest.tile_bytes + _SLACK, dtype=np.int64)
    if (table.lengths > sizes).any() or (table.lengths[table.methods == Method.UNCHANGED] != 0).any():
        raise WeightError("a patch is larger than its tile")
    for parcel in range(table.num_parcels):
        if table.parcel_size(parcel) > manifest.tile_bytes + _SLACK:
            raise WeightError(f"parcel {parcel} is larger than a tile")
