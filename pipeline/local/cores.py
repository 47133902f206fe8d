"""How the processors of one machine are divided among its workers.

In: numbers of workers. Out: environment variables for each. Two thread pools that both believe to
own all cores spin against each other and are many times slower than half the threads each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def available_cores() -> int:
    """Cores this process may use: its affinity, and the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def thread_environ(num_threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that give a worker this many threads; none where the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in environ:
        return {}
    return dict.fromkeys(_THREAD_VARIABLES, str(max(1, num_threads)))


def visible_gpus(environ: Mapping[str, str], device_dir: Path = Path("/dev")) -> list[str]:
    """Ids of the NVIDIA GPUs that the workers may share out."""
    if _GPU_VARIABLE in environ:
        return [part.strip() for part in environ[_GPU_VARIABLE].split(",") if part.strip()]
    return sorted((path.name.removeprefix("nvidia") for path in device_dir.glob("nvidia[0-9]*")), key=int)


def gpu_environ(gpus: list[str], index: int, num_generators: int, num_ranks: int = 1) -> dict[str, str]:
    """The GPU of generator `index`, or those of the trainer where index is num_generators.

    The trainer takes the last for itself, one for each of its ranks; generators share out the others.
    """
    if len(gpus) <= num_ranks:
        return {}
    if index == num_generators:
        return {_GPU_VARIABLE: ",".join(gpus[-num_ranks:])}
    return {_GPU_VARIABLE: gpus[index % (len(gpus) - num_ranks)]}
