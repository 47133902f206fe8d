"""A checkpoint as it lies on disk: found, read, verified.

In: a directory. Out: what is in it, or a CheckpointError that says which file is wrong and what to do.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import xxhash

from pipeline.errors import CheckpointError

STEP_DIR = re.compile(r"(?:\.replaced-|\.removing-)?step_(\d+)")
PLAIN_STATE = "learner.json"
_BLOCK_BYTES = 1 << 22


class Savable(Protocol):
    """What is written. A learner's copy in host memory may be written while the learner goes on."""

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, schedule and RNG: tensors and plain values."""

    def save_model(self, directory: Path, /) -> None:
        """Write the policy into an existing, empty directory."""


class Restorable(Protocol):
    """What goes on from a checkpoint."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from what `state_dict` gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint.

    step: optimiser steps it holds. sequence: order of writing. epoch: which of the run's trainers wrote it.
    saved_at: Unix seconds. num_bytes: in all. hashes: file -> xxh3-128 in hex; empty in one of an older version.
    """

    step: int
    sequence: int
    saved_at: float
    num_bytes: int
    path: Path
    epoch: int = 0
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def model_dir(self) -> Path:
        """Directory of the policy."""
        return self.path / "model"

    @property
    def state(self) -> dict[str, Any]:
        """The run's state as it was saved. Raises CheckpointError."""
        return self._read_json("state.json")

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable(name, error) from error
        if not isinstance(found, dict):
            raise self._unreadable(name, TypeError("it holds no object"))
        return found

    def attached(self, name: str) -> bytes | None:
        """A further file; None where it was written without. Raises CheckpointError."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(name, error) from error

    def learner_state(self) -> dict[str, Any]:
        """What `learner.state_dict()` gave, on the CPU. Raises CheckpointError."""
        plain = self.path / PLAIN_STATE
        if plain.exists():
            return self._read_json(PLAIN_STATE)
        import pickle

        import torch

        try:
            state = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise self._unreadable("optimizer.pt", error) from error
        return cast(dict[str, Any], state)

    def verify(self) -> int:
        """Hold every file against the hash that was written with it; returns how many were. Raises CheckpointError."""
        for name, expected in self.hashes.items():
            try:
                found = hash_of(self.path / name)
            except OSError as error:
                raise self._unreadable(name, error) from error
            if found != expected:
                raise CheckpointError(
                    f"{self.path / name} is not what was written (hash {found}, was {expected}). "
                    f"Move {self.path} away to go on from the checkpoint before it."
                )
        return len(self.hashes)

    def restore(self, learner: Restorable) -> None:
        """Put the learner back where it was. Raises CheckpointError."""
        learner.load_state_dict(self.learner_state())

    def _unreadable(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path / name} cannot be read: {error}. Move {self.path} away to go on from the checkpoint before it."
        )


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in a directory, or None unless every file has the size that was written."""
    match = STEP_DIR.fullmatch(path.name)
    if not match or not path.is_dir():
        return None
    try:
        marker = json.loads((path / "COMPLETE").read_text(encoding="utf-8"))
        sizes: dict[str, int] = marker["files"]
        if any((path / name).stat().st_size != size for name, size in sizes.items()):
            return None
        return Checkpoint(
            step=int(match[1]),
            sequence=int(marker["sequence"]),
            saved_at=float(marker["saved_at"]),
            num_bytes=sum(sizes.values()),
            path=path,
            epoch=int(marker.get("epoch", 0)),
            hashes={str(name): str(value) for name, value in marker.get("hashes", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def hash_of(path: Path) -> str:
    """xxh3-128 of a file, in hex. It finds what a disk or a copy has spoilt, not what someone has forged."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            state.update(block)
    return str(state.hexdigest())
