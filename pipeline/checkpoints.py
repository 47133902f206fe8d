"""Checkpoints on disk: the policy, the optimiser and where the run stands, all or nothing.

In: a learner and the run's state. Out: `step_000050/` with

    model/         as the learner saves it: a directory that other programs load
    optimizer.pt   the learner's state_dict, tensors and plain values only; learner.json where it has no tensors
    state.json     the run's state: cursor, version, group ids that it commits
    COMPLETE       written last: sequence number, time and the size of every file

A directory is written aside, forced to disk and renamed, so that a crash at any moment leaves the
older checkpoints and no half one. Nothing in a checkpoint can run code when it is loaded.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import structlog

from pipeline.config import CheckpointSettings
from pipeline.disk import sync
from pipeline.errors import CheckpointError, DiskFullError
from pipeline.messages import Json

_STEP_DIR = re.compile(r"(?:\.replaced-)?step_(\d+)")
_PLAIN_STATE = "learner.json"
_LEFTOVERS = (".writing-*", ".deleting-*")
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_log = structlog.get_logger()


class Restorable(Protocol):
    """What a checkpoint needs of a learner."""

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, schedule and RNG: tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from what `state_dict` gave."""

    def save_model(self, directory: Path, /) -> None:
        """Write the policy into an existing, empty directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint.

    step: optimiser steps it holds. sequence: order of writing. saved_at: Unix seconds. num_bytes: in all.
    """

    step: int
    sequence: int
    saved_at: float
    num_bytes: int
    path: Path

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
            return cast(dict[str, Any], json.loads((self.path / name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise self._unreadable(name, error) from error

    def learner_state(self) -> dict[str, Any]:
        """What `learner.state_dict()` gave, on the CPU. Raises CheckpointError."""
        plain = self.path / _PLAIN_STATE
        if plain.exists():
            return self._read_json(_PLAIN_STATE)
        import pickle

        import torch

        try:
            state = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise self._unreadable("optimizer.pt", error) from error
        return cast(dict[str, Any], state)

    def restore(self, learner: Restorable) -> None:
        """Put the learner back where it was. Raises CheckpointError."""
        learner.load_state_dict(self.learner_state())

    def _unreadable(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path / name} cannot be read: {error}. Move {self.path} away to go on from the checkpoint before it."
        )


class Checkpoints:
    """The checkpoints of one run. One process writes; any may list."""

    def __init__(
        self, directory: Path, settings: CheckpointSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._dir = directory
        self._settings = settings
        self._clock = clock

    def list(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first. What a crash has left half is not among them."""
        found: dict[int, Checkpoint] = {}
        if not self._dir.is_dir():
            return []
        # A checkpoint that was about to be replaced counts until its successor is in place.
        for path in sorted(self._dir.iterdir(), key=lambda entry: entry.name.startswith("."), reverse=True):
            checkpoint = _read(path)
            if checkpoint is not None:
                found[checkpoint.step] = checkpoint
        return sorted(found.values(), key=lambda checkpoint: checkpoint.sequence)

    def latest(self) -> Checkpoint | None:
        """The checkpoint that was completed last."""
        checkpoints = self.list()
        return checkpoints[-1] if checkpoints else None

    def save(self, step: int, *, learner: Restorable, state: Mapping[str, Json]) -> Path:
        """Write the checkpoint of `step` and delete those beyond `checkpoint.keep`.

        Raises DiskFullError or CheckpointError; the checkpoints that were there are untouched then.
        """
        latest = self.latest()
        aside = self._dir / f".writing-step_{step:06d}"
        try:
            self._remove_leftovers()
            (aside / "model").mkdir(parents=True)
            _write_parts(aside, learner, state)
            _write_marker(aside, step, sequence=latest.sequence + 1 if latest else 1, saved_at=self._clock())
            path = self._put_in_place(aside, self._dir / f"step_{step:06d}")
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError | RuntimeError | ValueError) or _is_disk_full(error):
                raise _failure(error, step, self._dir, latest) from error
            raise
        self._rotate()
        return path

    def _put_in_place(self, aside: Path, path: Path) -> Path:
        replaced = self._dir / f".replaced-{path.name}"
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        aside.rename(path)
        sync(self._dir)
        shutil.rmtree(replaced, ignore_errors=True)
        return path

    def _rotate(self) -> None:
        """Delete the oldest; renamed first, so that a crash leaves no half one under a good name."""
        for checkpoint in self.list()[: -self._settings.keep]:
            doomed = self._dir / f".deleting-{checkpoint.path.name.lstrip('.')}"
            try:
                checkpoint.path.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                _log.warning("old_checkpoint_not_deleted", path=str(checkpoint.path), error=str(error))

    def _remove_leftovers(self) -> None:
        for pattern in _LEFTOVERS:
            for path in self._dir.glob(pattern):
                shutil.rmtree(path)


def _read(path: Path) -> Checkpoint | None:
    """The checkpoint in a directory, or None unless every file has the size that was written."""
    match = _STEP_DIR.fullmatch(path.name)
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
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_parts(aside: Path, learner: Restorable, state: Mapping[str, Json]) -> None:
    learner.save_model(aside / "model")
    learner_state = learner.state_dict()
    if _is_json(learner_state):
        (aside / _PLAIN_STATE).write_text(json.dumps(learner_state, allow_nan=False), encoding="utf-8")
    else:
        _write_tensors(aside / "optimizer.pt", learner_state)
    (aside / "state.json").write_text(json.dumps(dict(state), allow_nan=False), encoding="utf-8")


def _is_json(value: object) -> bool:
    """Whether JSON gives the value back as it is, so that torch is not needed for it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _write_tensors(path: Path, state: Mapping[str, object]) -> None:
    import torch

    _require_plain(state, "state_dict")
    with path.open("wb") as file:
        torch.save(state, file)


def _write_marker(aside: Path, step: int, *, sequence: int, saved_at: float) -> None:
    files = list(_files(aside))
    for file in files:
        sync(file)
    marker = {
        "step": step,
        "sequence": sequence,
        "saved_at": saved_at,
        "files": {file.relative_to(aside).as_posix(): file.stat().st_size for file in files},
    }
    (aside / "COMPLETE").write_text(json.dumps(marker, indent=1), encoding="utf-8")
    sync(aside / "COMPLETE")
    for directory in [aside, *(path for path in aside.rglob("*") if path.is_dir())]:
        sync(directory)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _require_plain(value: object, where: str) -> None:
    """A state that the loader would refuse must fail when it is written, not when it is needed."""
    import torch

    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_plain(item, f"{where}[{key!r}]")
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
        return
    if value is not None and type(value) not in {bool, int, float, str, bytes} and not isinstance(value, torch.Tensor):
        raise TypeError(f"{where} is {type(value).__name__}; a checkpoint holds tensors and plain values only")


def _failure(error: Exception, step: int, directory: Path, latest: Checkpoint | None) -> CheckpointError:
    intact = f"The checkpoint of step {latest.step} is intact." if latest else "There is no older checkpoint."
    if _is_disk_full(error):
        free = shutil.disk_usage(_existing(directory)).free
        return DiskFullError(
            f"no space left for the checkpoint of step {step} in {directory} ({free / 1e6:.0f} MB free): "
            f"free some space or lower checkpoint.keep. {intact}"
        )
    return CheckpointError(f"the checkpoint of step {step} cannot be written to {directory}: {error}. {intact}")


def _is_disk_full(error: BaseException | None) -> bool:
    """Libraries that write for us wrap the system's error in their own, or keep only its text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        if "No space left on device" in str(error) or "os error 28" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _existing(directory: Path) -> Path:
    return next(path for path in [directory, *directory.parents] if path.exists())
