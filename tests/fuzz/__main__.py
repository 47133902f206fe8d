"""A search for bytes that a decoder neither reads nor refuses, guided by the code that they reach.

    pip install atheris
    python -m tests.fuzz table -max_total_time=60

Words behind the name of the target go to libFuzzer. Bytes that it finds are left in the working directory.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

_USAGE = "usage: python -m tests.fuzz TARGET [WORDS FOR LIBFUZZER]; TARGET is one of"


def main(words: list[str]) -> int:
    """Ends with libFuzzer's exit code."""
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        return _refused("atheris is not installed: pip install atheris")
    with atheris.instrument_imports(include=["pipeline"]):
        from tests.fuzz.targets import targets
    known = targets()
    if not words or words[0] not in known:
        return _refused(f"{_USAGE} {', '.join(known)}")
    target = known[words[0]]
    with tempfile.TemporaryDirectory() as corpus:
        (Path(corpus) / "example").write_bytes(target.example)
        atheris.Setup([sys.argv[0], corpus, *words[1:]], target.read)
        atheris.Fuzz()
    return 0


def _refused(why: str) -> int:
    sys.stderr.write(f"error: {why}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
