"""What a folder holds: the newest version, and the patches that lead to it.

In: versions and roots. Out: the bytes of the file `current`, and back, and the names of all files.
Nothing in a pointer is believed before its hash and its types have been checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.weights.manifest import Manifest
from pipeline.weights.patches import PatchTable, cuts
from pipeline.weights.protocol import MAX_VERSION
from pipeline.weights.sealed import HASH_BYTES, seal, unseal

CURRENT = "current"
MAX_POINTER_BYTES = 1024 * 1024
SCHEMA = 1
_FIELDS = {"schema", "session", "weight_version", "root", "file_bytes", "steps"}
_NAME = re.compile(r"(?P<stem>\d{19}-[0-9a-f]{32})\.(?P<part>manifest|tiles-\d{6,}|patches|parcels-\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Patches from one version to the next that was published. num_bytes: of the table and all parcels."""

    base_version: int
    base_root: bytes
    weight_version: int
    root: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The newest version. file_bytes: into which tiles and parcels are gathered. steps: a chain that ends with it."""

    session: bytes
    weight_version: int
    root: bytes
    file_bytes: int
    steps: tuple[Step, ...] = ()

    def chain_from(self, version: int, root: bytes) -> tuple[Step, ...]:
        """The steps from that content to the newest; none where they do not reach back to it."""
        for index, step in enumerate(self.steps):
            if (step.base_version, step.base_root) == (version, root):
                return self.steps[index:]
        return ()


def stem(version: int, root: bytes) -> str:
    """What the names of a version's files begin with."""
    return f"{version:019d}-{root.hex()}"


def split_name(name: str) -> tuple[str, bool] | None:
    """The stem, and whether it is part of a step; None for what is no file of a version."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match["stem"], match["part"].startswith("pa"))


def version_of(item_stem: str) -> int:
    """The version that a stem belongs to."""
    return int(item_stem.partition("-")[0])


def manifest_name(version: int, root: bytes) -> str:
    """File of a manifest."""
    return f"{stem(version, root)}.manifest"


def table_name(version: int, root: bytes) -> str:
    """File of the patch table of the step to a version."""
    return f"{stem(version, root)}.patches"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Tiles or parcels as they lie in files, end to end. bounds: file i holds the pieces bounds[i] to bounds[i + 1]."""

    prefix: str
    sizes: Sequence[int]
    bounds: tuple[int, ...]

    @property
    def num_files(self) -> int:
        """Files, of which one without a byte is not written."""
        return len(self.bounds) - 1

    def name(self, file: int) -> str:
        """Of a file."""
        return f"{self.prefix}-{file:06d}"

    def pieces_of(self, file: int) -> range:
        """What is in it."""
        return range(self.bounds[file], self.bounds[file + 1])

    def file_size(self, file: int) -> int:
        """Bytes of a file."""
        return sum(self.sizes[index] for index in self.pieces_of(file))


def tile_pieces(manifest: Manifest, file_bytes: int) -> Pieces:
    """The tiles of a version."""
    sizes = [manifest.tile_size(index) for index in range(manifest.num_tiles)]
    return Pieces(f"{stem(manifest.weight_version, manifest.root)}.tiles", sizes, cuts(sizes, file_bytes))


def parcel_pieces(version: int, table: PatchTable, file_bytes: int) -> Pieces:
    """The parcels of the step to a version."""
    sizes = [table.parcel_size(index) for index in range(table.num_parcels)]
    return Pieces(f"{stem(version, table.root)}.parcels", sizes, cuts(sizes, file_bytes))


def encode_pointer(pointer: Pointer) -> bytes:
    """The bytes of `current`."""
    return seal(
        {
            "schema": SCHEMA,
            "session": pointer.session,
            "weight_version": pointer.weight_version,
            "root": pointer.root,
            "file_bytes": pointer.file_bytes,
            "steps": [
                [step.base_version, step.base_root, step.weight_version, step.root, step.num_bytes]
                for step in pointer.steps
            ],
        }
    )


def decode_pointer(payload: bytes) -> Pointer:
    """What `current` says. Raises WeightError saying what is wrong with it."""
    return unseal(payload, _read, what=repr(CURRENT), names=_FIELDS, schema=SCHEMA, max_bytes=MAX_POINTER_BYTES)


def _read(fields: dict[str, Any], _: bytes) -> Pointer:
    steps = []
    for base_version, base_root, version, root, num_bytes in fields["steps"]:
        _natural(base_version, version, num_bytes)
        _hashes(base_root, root)
        steps.append(
            Step(base_version=base_version, base_root=base_root, weight_version=version, root=root, num_bytes=num_bytes)
        )
    _natural(fields["weight_version"], fields["file_bytes"])
    _hashes(fields["session"], fields["root"])
    pointer = Pointer(
        session=fields["session"],
        weight_version=fields["weight_version"],
        root=fields["root"],
        file_bytes=fields["file_bytes"],
        steps=tuple(steps),
    )
    ends = [(step.weight_version, step.root) for step in steps]
    starts = [(step.base_version, step.base_root) for step in steps]
    if steps and [*starts[1:], (pointer.weight_version, pointer.root)] != ends:
        raise ValueError("its steps are no chain that ends with the version")
    return pointer


def _natural(*values: object) -> None:
    if any(type(value) is not int or not 0 <= value <= MAX_VERSION for value in values):
        raise TypeError(f"{values} are not numbers of 0 or more")


def _hashes(*values: object) -> None:
    if any(not isinstance(value, bytes) or len(value) != HASH_BYTES for value in values):
        raise TypeError(f"something other than {HASH_BYTES} bytes where a hash belongs")
