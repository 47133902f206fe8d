"""Groups that one vLLM had to leave, completed by another.

Scenario E3.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.engines import Interrupted
from pipeline.messages import PartialGroup
from pipeline.wire import decode, encode
from tests.engines.conftest import group_of
from tests.engines.test_interrupted import assert_goes_on
from tests.vllm.conftest import largest_gap, started, trainer_model
from tests.vllm.history import History

TOLERANCE = 1e-4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 8], ids=["full", "adapter"])
async def test_sequences_go_on_elsewhere_from_their_prefix_with_exact_logprobs(model_path: Path, rank: int) -> None:
    history = History(trainer_model(model_path, rank=rank), amount=0.02)
    groups = [
        group_of([5, 6, 7, 8], ordinal=0, max_tokens=100, group_size=8),
        group_of([9, 10], ordinal=1, max_tokens=110, group_size=8),
        group_of([9, 10], ordinal=2, max_tokens=110, group_size=8, top_k=7, keep_sampling_mask=True),
    ]
    plain, masked = groups[:2], groups[2]
    partials: list[PartialGroup] = []
    async with started(model_path, rank=rank, top_k=7) as first:
        await first.apply_weights(history.next())
        tasks = [asyncio.create_task(first.generate(group)) for group in groups]
        while first.num_tokens_generated < 60:  # noqa: ASYNC110  its tokens are what is waited for
            await asyncio.sleep(0.001)
        await first.interrupt()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Interrupted), result
            partials.append(decode(encode(result.partial), PartialGroup))
        assert first.num_unfinished_seqs == 0
        with pytest.raises(Interrupted):
            await first.generate(plain[0])
    assert min(len(partial.unfinished) for partial in partials) > 0
    history.next()
    async with started(model_path, rank=rank, top_k=7) as second:
        await second.apply_weights(history.state(1))
        results = await asyncio.gather(*map(second.generate, groups, partials))
    for partial, result in zip(partials, results, strict=True):
        assert_goes_on(partial, result)
        for index, begun in partial.unfinished.items():
            spans = [(span.weight_version, span.first_token) for span in result[index].spans]
            assert spans == [(0, 0), (1, len(begun))]
    for group, result in zip(plain, results, strict=False):
        assert largest_gap(history.model, group, result) < TOLERANCE
    for completion in results[groups.index(masked)]:
        mask = completion.sampling_mask
        assert mask is not None
        assert mask.num_kept.tolist() == [7] * len(completion)
