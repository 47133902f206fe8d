"""The beginning of a process, which is importing for the most part.

Whoever imports makes objects by the hundred thousand and drops hardly any. To look through them for
cycles after every 700 takes a fourth of the time until a worker is there, and to do it once more at
the end a tenth.
"""

from __future__ import annotations

import gc

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
