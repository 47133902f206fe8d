"""Reading rows from where they lie.

In: a path or Hub id. Out: (row number from 1, mapping of columns), one at a time. `pyarrow` and
`datasets` are optional and imported when they are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from pipeline.errors import ConfigError, DataError

RawRow: TypeAlias = Mapping[str, object]

_EXAMPLE = 'such as {"prompt": "..."}'
_JSONL = frozenset({".jsonl", ".ndjson", ".json"})
_PARQUET = frozenset({".parquet", ".pq"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")


def read_rows(path: str, split: str) -> Iterator[tuple[int, RawRow]]:
    """Rows of a file, a directory or a Hub data set ("id" or "id:configuration")."""
    if not path:
        raise ConfigError("data.path is empty: name a JSONL or parquet file, or a Hub data set id")
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix in _JSONL | _PARQUET:
        if not file.is_file():
            raise DataError(f"{path}: there is no such file; relative paths count from {Path.cwd()}")
        return _read_jsonl(file) if suffix in _JSONL else _read_parquet(file)
    if file.is_file():
        raise DataError(f"{path}: the ending {suffix!r} is unknown; use .jsonl or .parquet")
    if not file.is_dir() and not _HUB_ID.fullmatch(path):
        raise DataError(f"{path}: there is no such file, and a Hub data set id looks like name/data or name/data:part")
    return _read_hub(path, split)


def is_on_hub(path: str) -> bool:
    """Whether reading it may mean to download it."""
    return Path(path).suffix.lower() not in _JSONL | _PARQUET and not Path(path).exists()


def _read_jsonl(file: Path) -> Iterator[tuple[int, RawRow]]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip(b" \t\r\n\xef\xbb\xbf"):
                    yield number, _parse_line(f"{file}, row {number}", line)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _parse_line(where: str, line: bytes) -> RawRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); each line is one object, {_EXAMPLE}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}; each line is one object, {_EXAMPLE}")
    return row


def _read_parquet(file: Path) -> Iterator[tuple[int, RawRow]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise _missing_extra(str(file), "pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable parquet file (after row {number}): {error}") from error


def _read_hub(path: str, split: str) -> Iterator[tuple[int, RawRow]]:
    try:
        import datasets
    except ImportError as error:
        raise _missing_extra(path, "datasets") from error
    name, _, part = (path, "", "") if Path(path).is_dir() else path.partition(":")
    try:
        table = datasets.load_dataset(name, part or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path}, split {split!r}: cannot be loaded: {error}") from error
    return ((number, row) for number, row in enumerate(table, 1))


def _missing_extra(path: str, package: str) -> ConfigError:
    return ConfigError(
        f"{path!r} is not a JSONL file and reading it needs {package}, which is not installed: "
        "pip install 'rollstream[data]', or give a .jsonl file"
    )
