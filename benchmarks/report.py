"""What all benchmarks print, in one shape.

In: a name and results. Out: lines for people, or one JSON object as the last line.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version

import psutil

from pipeline.local.cores import available_cores


def machine() -> dict[str, object]:
    """Where it was measured; load is that of the last minute."""
    return {
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "redis_py": version("redis"),
    }


def report(name: str, results: Mapping[str, object], *, as_json: bool) -> None:
    """Print the results of benchmark `name`."""
    if as_json:
        print(json.dumps({"benchmark": name, "results": dict(results), "machine": machine()}))
        return
    for key, value in results.items():
        print(f"{key:<36} {value}")
