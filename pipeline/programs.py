"""Our own programs, to be started as processes.

In: a module. Out: the command that runs it, with the modules that this process would find: those of a
project in the working directory may have the names of ours.
"""

from __future__ import annotations

import os
import sys


def program(module: str) -> tuple[str, ...]:
    """Python's `-m` looks into the working directory first; it does not where this process does not look at all."""
    looks_here = "" in sys.path or os.getcwd() in sys.path
    return (sys.executable, *(() if looks_here else ("-P",)), "-m", module)
