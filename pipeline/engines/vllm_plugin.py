"""What vLLM runs in each of its processes: the entry point `vllm.general_plugins`.

In: nothing. Out: a weight transfer backend named `rollstream`, and processes that end when the
generator that started them has ended, even where it was killed.
"""

from __future__ import annotations

import os
import threading
import time

BACKEND = "rollstream"
PARENT_VARIABLE = "ROLLSTREAM_VLLM_PARENT"

_LOOK_EVERY_S = 1.0


def register() -> None:
    """Called by vLLM; may be called more than once in a process."""
    _register_backend()
    _end_with_parent()


def _register_backend() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # an older vLLM; the engine refuses it and says so, other uses of that vLLM go on
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "pipeline.engines.vllm_transfer", "RollstreamTransfer")


def _end_with_parent() -> None:
    """In processes below a generator: end when the process above has gone."""
    generator = os.environ.get(PARENT_VARIABLE)
    if generator is None or generator == str(os.getpid()):
        return
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)
