"""vLLM's AsyncLLM without any of our code around it: what the pipeline is compared with."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from pipeline.config import Config
from pipeline.engines.shared_weights import SharedWeights
from pipeline.engines.vllm_options import engine_arguments, prepare_environment
from pipeline.messages import PromptGroup
from pipeline.weights import WeightState

_NUM_UPDATES = 5


async def measure_bare(config: Config, groups: Sequence[PromptGroup], weights: WeightState) -> dict[str, float]:
    """tokens_per_s over all groups at once; apply_s: median seconds of weight updates while nothing is decoded."""
    llm = await asyncio.to_thread(_start, config)
    try:
        await asyncio.gather(*(_generate(llm, group) for group in groups[:8]))
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(_generate(llm, group) for group in groups)))
        seconds = time.perf_counter() - started
        return {"tokens_per_s": tokens / seconds, "apply_s": await _apply_s(llm, weights)}
    finally:
        await asyncio.to_thread(llm.shutdown)


def _start(config: Config) -> Any:
    prepare_environment(config.generation, os.environ)
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(config, dtype="float32", context=128, is_cpu=True)
    transfer = WeightTransferConfig(**arguments["weight_transfer_config"])
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**(arguments | {"weight_transfer_config": transfer})))


async def _generate(llm: Any, group: PromptGroup) -> int:
    """All completions of a group in one request, as one would ask for them; returns their tokens."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    sampling = group.sampling
    params = SamplingParams(
        n=sampling.group_size,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=group.ordinal,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    request = llm.generate(tokens_input(group.prompt_token_ids.tolist()), params, group.group_id)
    outputs = [output async for output in request]  # one: the final
    return sum(len(completion.token_ids) for completion in outputs[-1].outputs)


async def _apply_s(llm: Any, weights: WeightState) -> float:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    shared = SharedWeights()
    request = WeightTransferUpdateRequest(update_info={"shared": shared.write(weights)})
    seconds = []
    for version in range(_NUM_UPDATES):
        started = time.perf_counter()
        await llm.start_weight_update()
        await llm.update_weights(request)
        await llm.finish_weight_update(weight_version=str(version))
        seconds.append(time.perf_counter() - started)
    shared.close()
    return statistics.median(seconds)
