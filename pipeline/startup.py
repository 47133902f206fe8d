"""The beginning of a process, which is importing for the most part.

Whoever imports makes objects by the hundred thousand and drops hardly any. To look through them for
cycles after every 700 takes a fourth of the time until a worker is there, and to do it once more at
the end a tenth.
"""

from __future__ import annotations

import gc
import sys

_RARELY = 50_000
_AS_USUAL = gc.get_threshold()


def begin() -> None:
    """Look for cycles rarely, until `settle`."""
    gc.set_threshold(_RARELY, *_AS_USUAL[1:])


def settle() -> None:
    """The end of what `begin` began: what there is now stays and is not looked through any more."""
    if gc.get_threshold()[0] == _RARELY:
        gc.freeze()
        gc.set_threshold(*_AS_USUAL)


def import_structlog() -> None:
    """Import it as if there were no rich, which it would load to draw tracebacks as no worker shows them.

    That is a tenth of what a worker imports.
    """
    if sys.modules.keys() & {"rich", "structlog"}:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
