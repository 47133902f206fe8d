"""Folders of this user's own among the temporary files of this machine.

In: what a folder is for. Out: its path, the same for every process of the user, closed to all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from pipeline.errors import ConfigError


def own_folder(purpose: str) -> Path:
    """A folder that exists. Raises ConfigError where somebody else has made it, or others may enter."""
    name = hashlib.sha256(os.fsencode(purpose)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rollstream-{os.getuid()}-{name}"
    found = make_folder(folder)
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} belongs to somebody else: remove it, or let TMPDIR name another folder")
    return folder


def make_folder(folder: Path) -> os.stat_result:
    """Make it for this user alone, where it is missing; others may be removing it at this moment."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        with contextlib.suppress(FileNotFoundError):
            return folder.lstat()
