"""Whether the files of the newest version still are what was written.

In: what they should hold, and a listing of the folder. Out: those that are gone, cut off or changed.
It writes nothing, and reads a file only where the listing cannot tell, and one more at each look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.weights.store.files import File
from pipeline.weights.store.folder import Folder, Stamp


class Upkeep:
    """Of one version, until the next is begun with `forget`.

    A file whose stamp is as it was is believed, until its turn comes: one at each look is read and compared,
    since what rots on a disk changes no date.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._right: dict[str, Stamp] = {}  # stamps of files that hold what they should
        self._turn = 0

    def forget(self) -> None:
        """Another version is the newest."""
        self._right.clear()
        self._turn = 0

    def note(self, stamps: Mapping[str, Stamp]) -> None:
        """What a listing showed when all had just been written."""
        for name, stamp in stamps.items():
            self._right.setdefault(name, stamp)

    def wrong(self, files: Sequence[File], stamps: Mapping[str, Stamp]) -> list[File]:
        """Those that are to be written again. stamps: of a new listing. Raises OSError."""
        in_turn = files[self._turn % len(files)][0] if files else ""
        self._turn += 1
        return [file for file in files if not self._is_right(file, stamps.get(file[0]), is_read=file[0] == in_turn)]

    def _is_right(self, file: File, stamp: Stamp | None, *, is_read: bool) -> bool:
        name, parts = file
        size = sum(map(len, parts))
        is_right = stamp is not None and stamp[0] == size
        if is_right and (is_read or self._right.get(name) != stamp):
            is_right = self._holds(name, parts, size)
        if is_right and stamp is not None:
            self._right[name] = stamp
        else:
            self._right.pop(name, None)
        return is_right

    def _holds(self, name: str, parts: Sequence[bytes | memoryview], size: int) -> bool:
        try:
            return self._folder.read(name, size + 1) == b"".join(parts)
        except FileNotFoundError:
            return False
