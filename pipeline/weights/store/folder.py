"""A folder of whole files, in a directory or an object store.

In: names and bytes. Out: the same bytes. A file is there whole or not at all, under its name, once
`write` has returned. What goes wrong is an OSError, whichever library the store is reached by.
Nothing outside the folder is read, written or removed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import ConfigError

_LOCAL = frozenset({"file", "local"})
# Stores of which a file appears whole when it is put, and the package that fsspec needs for each.
_WHOLE_PUTS = {
    "memory": "fsspec",
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
_ASIDE = ".writing"  # behind the name of a file that is not whole
# What the stores' own libraries call that which changes with a file's content.
_TAGS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created")

Stamp = tuple[int, str]  # bytes of a file, and what is another when it has been written again


class Folder(ABC):
    """Reads may come from several threads at once; so may writes of different names."""

    @abstractmethod
    def create(self) -> None:
        """Make it, if it is not there. What it lies in has to be there."""

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """Its first `limit` bytes. Raises FileNotFoundError and other OSErrors."""

    @abstractmethod
    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """All of a file, in place of one that is there. Raises OSError, and the old one is untouched."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """A file that may be gone already."""

    @abstractmethod
    def stamps(self) -> dict[str, Stamp]:
        """What is there, by name; nothing where there is no such folder."""

    def names(self) -> list[str]:
        """Their names."""
        return list(self.stamps())


def check_store(url: str) -> None:
    """Raises ConfigError where `weights.store` cannot be used. Asks no server."""
    _open(url)


def missing_directory(url: str) -> str:
    """The directory that a store of a usable URL is meant to be, where it is not there; else nothing."""
    filesystem, path = _open(url)
    return path if filesystem is None and not Path(path).is_dir() else ""


def open_folder(url: str, prefix: str) -> Folder:
    """The folder `prefix` below `weights.store`. Raises ConfigError."""
    filesystem, path = _open(url)
    return LocalFolder(Path(path) / prefix) if filesystem is None else RemoteFolder(filesystem, f"{path}/{prefix}")


def _open(url: str) -> tuple[Any, str]:
    """An fsspec file system, None for a directory, and the path in it."""
    setting = f"weights.store = {url!r}"
    protocol, mark, rest = url.partition("://")
    if mark and (protocol not in _LOCAL | _WHOLE_PUTS.keys() or "::" in url):
        raise ConfigError(
            f"{setting}: no store is known by {protocol + mark!r}; use a directory that all machines share, or one "
            f"of {', '.join(f'{name}://' for name in _WHOLE_PUTS if name != 'memory')}"
        )
    if mark and not rest.strip("/"):
        raise ConfigError(f"{setting} names no place: write {protocol}://bucket/folder")
    if urlsplit(url).password:
        raise ConfigError(
            "weights.store holds a password: it would be shown in logs; give it to the store's own library, "
            "through the environment or its configuration file"
        )
    import fsspec

    if not mark or protocol in _LOCAL:
        return None, str(fsspec.filesystem("file")._strip_protocol(url))
    try:
        filesystem, path = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise ConfigError(f"{setting} needs {_WHOLE_PUTS[protocol]}: {_way_to_get(protocol)}") from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{setting} cannot be used: {error}") from error
    return filesystem, str(path).rstrip("/")


def _way_to_get(protocol: str) -> str:
    package = _WHOLE_PUTS[protocol]
    return 'pip install "rollstream[s3]"' if package == "s3fs" else f"pip install {package}"


class LocalFolder(Folder):
    """A directory, perhaps of a shared file system. A file is written aside, made durable and renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self) -> None:
        # Not with its parents: a share that is not mounted must not be mistaken for an empty one.
        self._path.mkdir(exist_ok=True)

    def read(self, name: str, limit: int) -> bytes:
        with (self._path / name).open("rb") as file:
            return file.read(min(limit, os.fstat(file.fileno()).st_size))

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        aside = self._path / f"{name}{_ASIDE}"
        try:
            with aside.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self._path / name)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        self._keep_names()

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def stamps(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it went meanwhile
                    status = entry.stat()
                    found[entry.name] = status.st_size, f"{status.st_mtime_ns}"
        return found

    def _keep_names(self) -> None:
        """Renames outlast a power cut once the directory has been written."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network file systems have no such call for directories
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RemoteFolder(Folder):
    """A prefix in an object store. filesystem: of fsspec, without a cache of listings."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path

    def create(self) -> None:
        """Object stores have no folders."""

    def read(self, name: str, limit: int) -> bytes:
        with _as_os_error(name):
            return bytes(self._filesystem.cat_file(f"{self._path}/{name}", start=0, end=limit))

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        with _as_os_error(name):
            self._filesystem.pipe_file(f"{self._path}/{name}", b"".join(parts))

    def remove(self, name: str) -> None:
        with _as_os_error(name), suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{name}")

    def stamps(self) -> dict[str, Stamp]:
        with _as_os_error(self._path):
            try:
                found = self._filesystem.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}
        return {
            str(entry["name"]).rpartition("/")[2]: (
                int(entry.get("size") or 0),
                " ".join(str(entry[tag]) for tag in _TAGS if tag in entry),
            )
            for entry in found
        }


@contextmanager
def _as_os_error(name: str) -> Iterator[None]:
    """The libraries behind fsspec have exceptions of their own for what is down, refused or slow."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {error}") from error


def is_aside(name: str) -> bool:
    """Whether it is a file that was never finished."""
    return name.endswith(_ASIDE)


def without_aside(name: str) -> str:
    """The name that a file was to have."""
    return name.removesuffix(_ASIDE)
