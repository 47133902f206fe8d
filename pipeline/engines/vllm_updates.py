"""New weights given to a running vLLM, between two of its steps.

In: a description of tensors in shared memory, already checked against the model. Out: an engine that
goes on with them under their own label, and how long it stood still.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from pipeline.engines.vllm_worker import MEND
from pipeline.errors import EngineLostError, WeightError


async def unless_dead(work: Awaitable[None]) -> None:
    """Something asked of vLLM. Raises EngineLostError where it has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        await work
    except EngineDeadError as error:
        raise EngineLostError(f"vLLM has ended: {error}") from error


class CacheMender:
    """Makes harmless what weights that overflow leave in vLLM's cache, before others get its blocks."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._one_at_a_time = asyncio.Lock()
        self._num_failed = 0

    async def mend(self) -> None:
        """After a group failed with NonFiniteError; those that fail meanwhile share the next time."""
        self._num_failed += 1
        async with self._one_at_a_time:
            if self._num_failed:
                self._num_failed = 0
                await unless_dead(self._llm.collective_rpc(MEND))


async def replace_weights(llm: Any, shared: Mapping[str, Any], weight_version: int, *, is_recomputed: bool) -> float:
    """Pause, apply in the workers, label, resume; returns the seconds of the pause.

    shared: what `SharedWeights.write` returned. is_recomputed: keys and values of the tokens so far are
    made anew. Raises WeightError: nobody knows then which weights there are; EngineLostError: nor will be.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        # As `pause_generation` does, without its moment of waiting for outputs to be read. It
        # returns when the step under way is done: from here on generation stands still.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=is_recomputed)
        started = time.perf_counter()
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"shared": shared}))
        await llm.finish_weight_update(weight_version=str(weight_version))
        await llm.resume_generation()
    except EngineDeadError as error:
        raise EngineLostError(f"vLLM has ended: {error}") from error
    except Exception as error:
        reason = f"vLLM could not apply weights {weight_version}: {error}"
        if llm.vllm_config.parallel_config.world_size > 1:
            # Where one of several workers fails, vLLM takes the others' answers for those to its next questions.
            raise EngineLostError(f"{reason}; with several workers it cannot go on after that") from error
        raise WeightError(reason) from error
    return time.perf_counter() - started
