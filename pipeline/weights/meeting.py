"""Where processes of one machine meet: a folder, and locks that end with who holds them, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

_USERS = "users.lock"


def enter(folder: Path) -> int:
    """A lock that says that somebody is in the folder, which is made where it is missing."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        users = open_lock(folder / _USERS)
        fcntl.flock(users, fcntl.LOCK_SH)
        if (folder / _USERS).exists():
            return users
        os.close(users)  # the last one before us was just leaving


def leave(folder: Path, users: int) -> None:
    """Give up the lock of `enter`; the last one removes the folder."""
    if lock(users, fcntl.LOCK_EX):
        shutil.rmtree(folder, ignore_errors=True)
    os.close(users)


def remove_abandoned(beside: Path) -> None:
    """Remove folders like this one whose users were all killed: nobody was left to do it."""
    for folder in beside.parent.glob(f"rollstream-{os.getuid()}-*"):
        if folder != beside and (folder / _USERS).exists():
            leave(folder, open_lock(folder / _USERS))


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
