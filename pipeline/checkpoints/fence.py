"""Which trainer may write checkpoints: the last one that has begun.

In: a directory of checkpoints. Out: the number of the trainer that may write there. A trainer that stood
still while another took its place finds a higher number than its own, writes nothing, and what it had
just completed does not count. Clocks and leases have no part in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoints.found import Checkpoint
from pipeline.disk import write_whole
from pipeline.errors import CheckpointError, TrainerReplacedError

_FILE = "fence.json"


class Fence:
    """epoch: this trainer's number; that of the newest one where this is none."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self._own: int | None = None

    @property
    def epoch(self) -> int:
        """Goes into what is written."""
        return self._read()[0] if self._own is None else self._own

    def raise_(self, newest_sequence: int) -> None:
        """This trainer is the newest; of what others write only that up to `newest_sequence` counts. Raises OSError."""
        epoch = self._read()[0] + 1
        write_whole(self._path, json.dumps({"epoch": epoch, "sequence": newest_sequence}) + "\n")
        self._own = epoch

    def check(self) -> None:
        """Raises TrainerReplacedError where a newer trainer has begun."""
        if self._own is not None and self._read()[0] != self._own:
            raise TrainerReplacedError(
                "another trainer took the run over while this one wrote a checkpoint, which is thrown away"
            )

    def those_that_count(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Without those that a trainer completed after another had begun."""
        epoch, sequence = self._read()
        return [item for item in checkpoints if item.epoch >= epoch or item.sequence <= sequence]

    def _read(self) -> tuple[int, int]:
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
            return int(said["epoch"]), int(said["sequence"])
        except (FileNotFoundError, NotADirectoryError):
            return 0, 0
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {error}. It says which trainer may write here; where none is running, "
                "remove it"
            ) from error
