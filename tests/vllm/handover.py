"""Groups that one engine began and another completes, where one of both is vLLM.

Scenario E3. The other is the engine of transformers, which is there at once and draws from the same
weights: what travels between two vLLMs is what travels here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pipeline.config import GenerationSettings, LoraSettings, ModelSettings
from pipeline.engines import GenerationEngine
from pipeline.engines.transformers import TransformersEngine
from pipeline.weights import WeightState
from tests.engines.conftest import group_of
from tests.engines.test_interrupted import assert_goes_on, interrupted
from tests.vllm.conftest import largest_gap
from tests.vllm.history import History

TOP_K = 7
TOLERANCE = 1e-4


@asynccontextmanager
async def transformers_engine(
    path: Path, state: WeightState, lora: LoraSettings | None = None
) -> AsyncIterator[TransformersEngine]:
    """It serves `state`, on one thread."""
    generation = GenerationSettings(device="cpu", dtype="float32", num_threads=1)
    engine = TransformersEngine(ModelSettings(path=str(path)), lora or LoraSettings(), generation, seed=0)
    await engine.start()
    try:
        await engine.apply_weights(state)
        yield engine
    finally:
        await engine.close()


async def assert_handed_over(
    first: GenerationEngine, second: GenerationEngine, history: History, *, ordinal: int
) -> None:
    """What `first` had of some groups is completed by `second` with newer weights, and each token says whose it is."""
    old = first.weight_version
    plain = [
        group_of([5, 6, 7, 8], ordinal=ordinal, max_tokens=100, group_size=8),
        group_of([9, 10], ordinal=ordinal + 1, max_tokens=110, group_size=8),
    ]
    masked = group_of([9, 10], ordinal=ordinal + 2, max_tokens=110, group_size=8, top_k=TOP_K, keep_sampling_mask=True)
    partials = await interrupted(first, *plain, masked, after=60)
    assert any(partial.unfinished for partial in partials.values())
    await second.apply_weights(history.next())
    groups = [group for group in (*plain, masked) if group.group_id in partials]
    results = await asyncio.gather(*(second.generate(group, partials[group.group_id]) for group in groups))
    for group, result in zip(groups, results, strict=True):
        partial = partials[group.group_id]
        assert_goes_on(partial, result)
        for index, begun in partial.unfinished.items():
            spans = [(span.weight_version, span.first_token) for span in result[index].spans]
            assert spans == [(old, 0), (history.newest, len(begun))]
        if group is not masked:
            assert largest_gap(history.model, group, result) < TOLERANCE
            continue
        for completion in result:
            assert completion.sampling_mask is not None
            assert completion.sampling_mask.num_kept.tolist() == [TOP_K] * len(completion)
