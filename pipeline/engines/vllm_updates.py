"""New weights given to a running vLLM, between two of its steps.

In: a description of tensors in shared memory, already checked against the model. Out: an engine that
goes on with them under their own label, and how long it stood still.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from pipeline.engines.vllm_worker import PATH, SPARE_STATUS
from pipeline.errors import EngineLostError, WeightError
from pipeline.logs import get_logger

_ASK_AGAIN_S = 0.05  # each question makes the workers wait for an instant

log = get_logger()


async def unless_dead(work: Awaitable[None]) -> None:
    """Something asked of vLLM. Raises EngineLostError where it has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        await work
    except EngineDeadError as error:
        raise EngineLostError(f"vLLM has ended: {error}") from error


async def are_prepared(llm: Any, shared: Mapping[str, Any], weight_version: int) -> bool:
    """Let the workers make everything ready while they generate; whether they could. Raises EngineLostError.

    shared: what `SharedWeights.write` returned. Where it fails nothing has changed, and they can still be replaced.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.v1.engine.exceptions import EngineDeadError

    if llm.vllm_config.parallel_config.worker_extension_cls != PATH:
        return False  # somebody else's, which does not say how far it is
    try:
        info = {"shared": shared, "prepared": weight_version}
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        while True:
            statuses = await llm.collective_rpc(SPARE_STATUS)
            if None in statuses:
                return False
            if problems := [status["problem"] for status in statuses if status["problem"]]:
                log.warning("weights_not_prepared", weight_version=weight_version, reason=problems[0])
                return False
            if all(status["weight_version"] == weight_version for status in statuses):
                return True
            await asyncio.sleep(_ASK_AGAIN_S)
    except EngineDeadError as error:
        raise EngineLostError(f"vLLM has ended: {error}") from error


async def replace_weights(llm: Any, weights: Mapping[str, Any], weight_version: int, *, is_recomputed: bool) -> float:
    """Pause, apply in the workers, label, resume; returns the seconds of the pause.

    weights: fields of `UpdateInfo`. is_recomputed: keys and values of the tokens so far are
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
        await llm.update_weights(WeightTransferUpdateRequest(update_info=dict(weights)))
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
