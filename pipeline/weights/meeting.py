"""Where processes of one machine meet: a folder, and locks that end with who holds them, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from pipeline.places import make_folder

_USERS = "users.lock"


def enter(folder: Path) -> int:
    """A lock that says that somebody is in the folder, which is made where it is missing."""
    while True:
        make_folder(folder)
        try:
            users = open_lock(folder / _USERS)
        except FileNotFoundError:
            continue  # the last one before us has just left
        fcntl.flock(users, fcntl.LOCK_SH)
        if _is_at(users, folder / _USERS):
            return users
        os.close(users)  # the last one before us was just leaving


def leave(folder: Path, users: int) -> None:
    """Give up the lock of `enter`; the last one removes the folder."""
    if lock(users, fcntl.LOCK_EX) and _is_at(users, folder / _USERS):
        # The lock goes last: whoever comes meanwhile waits for it, and finds that it is not there any more.
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _USERS:
                path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(users)


class OwnFolder:
    """A folder of this process, gone when it is closed; one that was killed leaves it to the next to be removed.

    parent: where it lies; None for where temporary files do. Raises OSError.
    """

    def __init__(self, parent: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"rollstream-{os.getuid()}-", dir=parent))
        self._users: int | None = enter(self.path)
        remove_abandoned(self.path)

    def close(self) -> None:
        """Remove it. Safe to call twice."""
        users, self._users = self._users, None
        if users is not None:
            leave(self.path, users)


def _is_at(fd: int, path: Path) -> bool:
    """Whether that file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def remove_abandoned(beside: Path) -> None:
    """Remove folders like this one whose users were all killed: nobody was left to do it."""
    for folder in beside.parent.glob(f"rollstream-{os.getuid()}-*"):
        if folder == beside:
            continue
        try:
            users = os.open(folder / _USERS, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # it is no such folder, or another one is removing it
        leave(folder, users)


def open_lock(path: Path) -> int:
    """A file to lock."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def lock(fd: int, how: int) -> bool:
    """Whether the file could be locked at once. how: fcntl.LOCK_SH or LOCK_EX."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
