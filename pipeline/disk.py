"""Files that are whole or not there, whatever is killed and whenever the power fails.

In: a path and its content. Out: the file, or the one that was there before. Nobody who reads it ever
sees half of it.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write aside, force to disk, rename. mode: who may read it, from the first byte on. Raises OSError.

    One process writes a path at a time; what a killed one has left aside is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.unlink(missing_ok=True)  # it may have been readable by others
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
