"""All checkpoints of a run: written whole, kept in number, and by one trainer at a time.

In: a learner and the run's state. Out: directories that are complete or not there.
"""

from __future__ import annotations

import builtins
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from pipeline.checkpoints.fence import Fence
from pipeline.checkpoints.found import STEP_DIR, Checkpoint, Savable, read_checkpoint
from pipeline.checkpoints.writing import failure, is_disk_full, write_marker, write_parts
from pipeline.config import CheckpointSettings
from pipeline.disk import sync
from pipeline.errors import CheckpointError
from pipeline.messages import Json

_LEFTOVER = re.compile(r"\.(?:writing-(?:(?P<epoch>\d+)-)?|deleting-)")
_log = structlog.get_logger()


class Checkpoints:
    """The checkpoints of one run. One process writes; any may list."""

    def __init__(
        self, directory: Path, settings: CheckpointSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._dir = directory
        self._settings = settings
        self._clock = clock
        self._fence = Fence(directory)

    @property
    def directory(self) -> Path:
        """Where they are."""
        return self._dir

    def take_over(self) -> None:
        """From now on this object alone writes: whoever did before is refused, whenever it wakes up.

        Raises CheckpointError.
        """
        everything = self._everything()
        counted = self._fence.those_that_count(everything)
        newest = counted[-1].sequence if counted else 0
        try:
            self._fence.raise_(newest)
        except OSError as error:
            raise CheckpointError(f"{self._dir} cannot be written: {error}") from error
        for stale in [checkpoint for checkpoint in everything if checkpoint not in counted]:
            self._remove(stale)

    def _remove(self, stale: Checkpoint) -> None:
        """Unless another is under its name by now: this trainer, too, may have stood still and been replaced.

        Under the name that it has meanwhile it counts, should it be the other.
        """
        removing = self._dir / f".removing-step_{stale.step:06d}"
        try:
            stale.path.rename(removing)
            found = read_checkpoint(removing)
            if found is not None and (found.epoch, found.sequence) != (stale.epoch, stale.sequence):
                removing.rename(stale.path)
                return
            _log.warning("stale_checkpoint_removed", path=str(stale.path))
            shutil.rmtree(removing)
        except OSError as error:
            _log.warning("stale_checkpoint_not_removed", path=str(stale.path), error=str(error))

    def list(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first. What a crash has left half is not among them.

        Nor is what a trainer completed after another had taken the run over.
        """
        return self._fence.those_that_count(self._everything())

    def find(self, place: str) -> Checkpoint:
        """The checkpoint of a step or in a directory, "latest" for the newest. Raises CheckpointError."""
        path, there = Path(place).expanduser(), self.list()
        found = next((item for item in there if place.isdigit() and item.step == int(place)), None)
        found = there[-1] if place == "latest" and there else found
        if (found := found or read_checkpoint(path)) is None:
            steps = ", ".join(str(item.step) for item in there) or "none"
            raise CheckpointError(f"{place} is no complete checkpoint; {self._dir} has those of steps: {steps}")
        return found

    def _everything(self) -> builtins.list[Checkpoint]:
        found: dict[int, Checkpoint] = {}
        if not self._dir.is_dir():
            return []
        # A checkpoint that was about to be replaced counts until its successor is in place.
        for path in sorted(self._dir.iterdir(), key=lambda entry: entry.name.startswith("."), reverse=True):
            checkpoint = read_checkpoint(path)
            if checkpoint is not None:
                found[checkpoint.step] = checkpoint
        return sorted(found.values(), key=lambda checkpoint: (checkpoint.epoch, checkpoint.sequence))

    def latest(self) -> Checkpoint | None:
        """The checkpoint that was completed last."""
        checkpoints = self.list()
        return checkpoints[-1] if checkpoints else None

    def damaged(self) -> builtins.list[Path]:
        """What has the name of a checkpoint and is none, newest first, down to the newest that is one.

        A crash leaves nothing of the kind.
        """
        latest = self.latest()
        named = {path: STEP_DIR.fullmatch(path.name) for path in self._dir.glob("step_*")}
        steps = {path: int(match[1]) for path, match in named.items() if match and read_checkpoint(path) is None}
        newer = [path for path, step in steps.items() if latest is None or step > latest.step]
        return sorted(newer, key=lambda path: -steps[path])

    def save(
        self, step: int, *, learner: Savable, state: Mapping[str, Json], attached: Mapping[str, bytes] | None = None
    ) -> Path:
        """Write the checkpoint of `step` and delete those beyond `checkpoint.keep`. attached: further files by name.

        Raises DiskFullError or CheckpointError, and TrainerReplacedError where another has taken over; the
        checkpoints that were there are untouched then.
        """
        latest = self.latest()
        self._fence.check()
        epoch = self._fence.epoch
        aside = self._dir / f".writing-{epoch}-step_{step:06d}"
        try:
            self._remove_leftovers(epoch)
            (aside / "model").mkdir(parents=True)
            write_parts(aside, learner, state, attached or {})
            sequence = latest.sequence + 1 if latest else 1
            write_marker(aside, step, sequence=sequence, epoch=epoch, saved_at=self._clock())
            self._fence.check()
            path = self._put_in_place(aside, self._dir / f"step_{step:06d}")
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError | RuntimeError | ValueError) or is_disk_full(error):
                raise failure(error, step, self._dir, latest) from error
            raise
        self._rotate()
        return path

    def _put_in_place(self, aside: Path, path: Path) -> Path:
        replaced = self._dir / f".replaced-{path.name}"
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
            found = read_checkpoint(replaced)  # it counts under this name, too
            if found is not None and found.epoch > self._fence.epoch:
                replaced.rename(path)
                self._fence.check()
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

    def _remove_leftovers(self, epoch: int) -> None:
        """What crashes have left; a trainer that came after this one may be writing at this moment."""
        for path in self._dir.iterdir() if self._dir.is_dir() else ():
            found = _LEFTOVER.match(path.name)
            if found and int(found["epoch"] or 0) <= epoch:
                shutil.rmtree(path)
