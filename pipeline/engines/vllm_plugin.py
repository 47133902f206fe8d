"""What vLLM runs in each of its processes: the entry point `vllm.general_plugins`.

In: nothing. Out: a weight transfer backend named `rollstream`, and, of processes below a generator, such as end when
it has ended, even where it was killed, and as leave a CPU to others while they wait.
"""

from __future__ import annotations

import functools
import os
import threading
import time

BACKEND = "rollstream"
PARENT_VARIABLE = "ROLLSTREAM_VLLM_PARENT"

_LOOK_EVERY_S = 1.0
_SPIN_S, _LOOK_AGAIN_MS = 0.005, 50  # of processes that wait for each other's messages


def register() -> None:
    """Called by vLLM; may be called more than once in a process."""
    _register_backend()
    if PARENT_VARIABLE in os.environ:
        _end_with_parent()
        _wait_without_spinning()


def _register_backend() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # an older vLLM; the engine refuses it and says so, other uses of that vLLM go on
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "pipeline.engines.vllm_transfer", "RollstreamTransfer")


def _end_with_parent() -> None:
    """In processes below a generator: end when the process above has gone."""
    if os.environ[PARENT_VARIABLE] == str(os.getpid()):
        return
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _wait_without_spinning() -> None:
    """On a CPU: the scheduler would keep a core busy for as long as the model computes, and the model the other way.

    They are woken up when there is something to read; vLLM has no setting for it. ZeroMQ throws away a wake-up that
    follows another within a millisecond or two, so that they wait for a moment before they rest, and look now and then.
    """
    try:
        from vllm.distributed.device_communicators import shm_broadcast
        from vllm.platforms import current_platform
    except ImportError:
        return
    condition = getattr(shm_broadcast, "SpinCondition", None)
    if isinstance(condition, type) and current_platform.is_cpu():
        shm_broadcast.SpinCondition = functools.partial(condition, busy_loop_s=_SPIN_S)
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_AGAIN_MS


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)
