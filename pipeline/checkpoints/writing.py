"""The files of one checkpoint, written into a directory that nobody reads yet.

In: a learner, the run's state, and a directory aside. Out: all files on disk, and the marker that says
that they are whole. What goes wrong becomes an error that says what is still intact.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.checkpoints.found import PLAIN_STATE, Checkpoint, Savable, hash_of
from pipeline.disk import sync
from pipeline.errors import CheckpointError, DiskFullError
from pipeline.messages import Json

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_parts(aside: Path, learner: Savable, state: Mapping[str, Json], attached: Mapping[str, bytes]) -> None:
    """Model, learner, state, and further files by name."""
    learner.save_model(aside / "model")
    learner_state = learner.state_dict()
    if _is_json(learner_state):
        (aside / PLAIN_STATE).write_text(json.dumps(learner_state, allow_nan=False), encoding="utf-8")
    else:
        _write_tensors(aside / "optimizer.pt", learner_state)
    (aside / "state.json").write_text(json.dumps(dict(state), allow_nan=False), encoding="utf-8")
    for name, content in attached.items():
        (aside / name).write_bytes(content)


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


def write_marker(aside: Path, step: int, *, sequence: int, epoch: int, saved_at: float) -> None:
    """Everything forced to disk, and last the file that says so."""
    files = list(_files(aside))
    for file in files:
        sync(file)
    marker = {
        "step": step,
        "sequence": sequence,
        "epoch": epoch,
        "saved_at": saved_at,
        "hashes": {file.relative_to(aside).as_posix(): hash_of(file) for file in files},
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


def failure(error: Exception, step: int, directory: Path, latest: Checkpoint | None) -> CheckpointError:
    """The error to raise, with what there is to go on from."""
    intact = f"The checkpoint of step {latest.step} is intact." if latest else "There is no older checkpoint."
    if is_disk_full(error):
        free = shutil.disk_usage(_existing(directory)).free
        return DiskFullError(
            f"no space left for the checkpoint of step {step} in {directory} ({free / 1e6:.0f} MB free): "
            f"free some space or lower checkpoint.keep. {intact}"
        )
    return CheckpointError(f"the checkpoint of step {step} cannot be written to {directory}: {error}. {intact}")


def is_disk_full(error: BaseException | None) -> bool:
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
