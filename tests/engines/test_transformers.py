"""The transformers engine against plain forward passes of the same model."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch

from pipeline.config import GenerationSettings, LoraSettings, ModelSettings
from pipeline.engines.transformers import TransformersEngine
from pipeline.errors import EngineError
from pipeline.messages import Completion, FinishReason, PromptGroup
from tests.engines.conftest import MakeEngine, group_of, load, plain_logits


def processed(logits: torch.Tensor, group: PromptGroup) -> torch.Tensor:
    """Log-probabilities of the sampled distribution [T, V], written out token by token in float64."""
    sampling = group.sampling
    rows = []
    for row in logits / (sampling.temperature or 1.0):
        probabilities = row.softmax(-1)
        order = probabilities.argsort(descending=True, stable=True)
        allowed = order[: sampling.top_k] if sampling.top_k else order
        share = probabilities[allowed] / probabilities[allowed].sum()
        num_needed = int((share.cumsum(0) - share < sampling.top_p).sum())
        allowed = allowed[: max(num_needed, 1)] if sampling.top_p < 1 else allowed
        mask = torch.full_like(row, float("-inf"))
        mask[allowed] = 0.0
        rows.append((row + mask).log_softmax(-1))
    return torch.stack(rows)


def assert_exact(model: torch.nn.Module, group: PromptGroup, completions: tuple[Completion, ...]) -> None:
    """Every logprob is what one plain forward pass gives."""
    assert len(completions) == group.sampling.group_size
    for completion in completions:
        expected = processed(plain_logits(model, group, completion), group)
        chosen = expected.gather(1, torch.tensor(completion.token_ids.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(completion.generator_logprobs, chosen.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 5},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 12},
    ],
)
async def test_logprobs_equal_a_plain_forward_pass_with_sequences_that_come_and_go(
    make_engine: MakeEngine, tiny_model: ModelSettings, sampling: dict[str, float]
) -> None:
    engine = await make_engine(max_num_seqs=10)
    lengths = [1, 17, 5, 40, 2, 9, 23]
    groups = [
        group_of(list(range(4, 4 + length)), ordinal=i, max_tokens=6 + 5 * i, **sampling)
        for i, length in enumerate(lengths)
    ]
    first = [asyncio.create_task(engine.generate(group)) for group in groups[:4]]
    await first[0]
    rest = [asyncio.create_task(engine.generate(group)) for group in groups[4:]]
    model = load(tiny_model)
    for group, task in zip(groups, [*first, *rest], strict=True):
        assert_exact(model, group, await task)


async def test_groups_with_different_sampling_share_a_batch(make_engine: MakeEngine, tiny_model: ModelSettings) -> None:
    engine = await make_engine()
    groups = [
        group_of([4, 5, 6], ordinal=0, temperature=0.0),
        group_of([7, 8], ordinal=1, temperature=0.6, top_p=0.7),
        group_of([9, 10, 11, 12], ordinal=2, top_k=3),
        group_of([9, 10, 11, 12], ordinal=3),
    ]
    results = await asyncio.gather(*(engine.generate(group) for group in groups))
    model = load(tiny_model)
    for group, completions in zip(groups, results, strict=True):
        assert_exact(model, group, completions)


async def test_greedy_takes_the_best_token_and_reports_its_logprob_at_temperature_one(
    make_engine: MakeEngine, tiny_model: ModelSettings
) -> None:
    engine, group = await make_engine(), group_of([4, 5, 6], temperature=0.0, group_size=1)
    (completion,) = await engine.generate(group)
    logits = plain_logits(load(tiny_model), group, completion)
    assert completion.token_ids.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(completion.generator_logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-4)


async def test_a_completion_depends_on_its_seed_and_not_on_its_batch(make_engine: MakeEngine) -> None:
    crowded, lonely = await make_engine(max_num_seqs=32), await make_engine(max_num_seqs=3)
    groups = [group_of([4 + i, 5, 6 + i], ordinal=i, top_p=0.95 if i % 2 else 1.0) for i in range(6)]
    together = await asyncio.gather(*(crowded.generate(group) for group in groups))
    for group, expected in zip(groups, together, strict=True):
        alone = await lonely.generate(group)
        for mine, theirs in zip(alone, expected, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(mine.generator_logprobs, theirs.generator_logprobs, atol=1e-4)


async def test_seed_ordinal_and_index_each_change_the_completion(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    base, other_seed, other_ordinal = await asyncio.gather(
        engine.generate(group_of([4, 5, 6])),
        engine.generate(group_of([4, 5, 6], seed=8)),
        engine.generate(group_of([4, 5, 6], ordinal=1)),
    )
    seen = [tuple(completion.token_ids.tolist()) for completion in (*base, *other_seed, *other_ordinal)]
    assert len(set(seen)) == len(seen)


async def test_two_engines_with_the_same_submissions_agree_bit_for_bit(make_engine: MakeEngine) -> None:
    async def all_of(engine: TransformersEngine) -> list[bytes]:
        groups = [group_of(list(range(4, 6 + i)), ordinal=i, temperature=0.8) for i in range(9)]
        results = await asyncio.gather(*(engine.generate(group) for group in groups))
        return [c.generator_logprobs.tobytes() + c.token_ids.tobytes() for result in results for c in result]

    assert await all_of(await make_engine(max_num_seqs=16)) == await all_of(await make_engine(max_num_seqs=16))


async def test_draws_follow_the_distribution(make_engine: MakeEngine, tiny_model: ModelSettings) -> None:
    engine, num_draws = await make_engine(max_num_seqs=256), 4096
    group = group_of([4, 5, 6], group_size=num_draws, max_tokens=1)
    completions = await engine.generate(group)
    drawn = np.bincount([int(completion.token_ids[0]) for completion in completions], minlength=51) / num_draws
    expected = plain_logits(load(tiny_model), group, completions[0])[0].softmax(-1).numpy()
    assert np.abs(drawn - expected).sum() / 2 < 0.06


async def test_kept_ids_are_those_that_could_be_drawn(make_engine: MakeEngine, tiny_model: ModelSettings) -> None:
    engine = await make_engine()
    masked = group_of([4, 5, 6], temperature=0.7, top_p=0.8, keep_sampling_mask=True)
    plain = group_of([4, 5, 6], ordinal=1, keep_sampling_mask=True)
    results = await asyncio.gather(engine.generate(masked), engine.generate(plain))
    assert all(completion.sampling_mask is None for completion in results[1])
    model = load(tiny_model)
    for completion in results[0]:
        assert completion.sampling_mask is not None
        expected = processed(plain_logits(model, masked, completion), masked).isfinite()
        num_kept = completion.sampling_mask.num_kept
        assert num_kept.tolist() == expected.sum(-1).tolist()
        assert completion.sampling_mask.kept_ids.tolist() == expected.nonzero()[:, 1].tolist()


async def test_the_end_token_is_part_of_the_completion_and_not_of_its_text(make_engine: MakeEngine) -> None:
    engine = await make_engine(max_num_seqs=64)
    completions = await engine.generate(group_of([4, 5, 6], group_size=64, max_tokens=60, temperature=2.0))
    stopped = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == 2
        assert 2 not in completion.token_ids[:-1]
        assert "<eos>" not in completion.text
    for completion in completions:
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(completion) == 60


async def test_a_stop_text_ends_a_completion_and_is_cut_from_its_text(make_engine: MakeEngine) -> None:
    engine = await make_engine(max_num_seqs=64)
    group = group_of([4, 5, 6], group_size=32, max_tokens=60, temperature=3.0, stop=("ab", "z"))
    completions = await engine.generate(group)
    free = await engine.generate(group_of([4, 5, 6], group_size=32, max_tokens=60, temperature=3.0))
    assert any(len(completion) < len(other) for completion, other in zip(completions, free, strict=True))
    for completion, other in zip(completions, free, strict=True):
        at = min((other.text.find(stop) for stop in ("ab", "z") if stop in other.text), default=len(other.text))
        assert completion.text == other.text[:at]
        assert completion.token_ids.tolist() == other.token_ids[: len(completion)].tolist()


async def test_the_context_ends_a_completion(make_engine: MakeEngine, tiny_model: ModelSettings) -> None:
    engine = await make_engine(model=tiny_model.model_copy(update={"max_context": 16}))
    completions = await engine.generate(group_of([4] * 12, max_tokens=50, temperature=0.1))
    assert max(len(completion) for completion in completions) <= 4


async def test_a_prompt_without_room_fails_alone(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    good = asyncio.create_task(engine.generate(group_of([4, 5])))
    with pytest.raises(EngineError, match="128 tokens leaves nothing"):
        await engine.generate(group_of([4] * 128))
    with pytest.raises(EngineError, match="0 tokens"):
        await engine.generate(group_of([]))
    assert len(await good) == 4


async def test_cancelling_frees_the_sequences_and_leaves_the_others_alone(make_engine: MakeEngine) -> None:
    engine = await make_engine(max_num_seqs=4)
    expected = await engine.generate(group_of([8, 9], ordinal=3))
    hog = asyncio.create_task(engine.generate(group_of([4, 5], max_tokens=120, temperature=0.01)))
    waiting = asyncio.create_task(engine.generate(group_of([6, 7], ordinal=1, max_tokens=120)))
    await asyncio.sleep(0)
    hog.cancel()
    waiting.cancel()
    await asyncio.wait([hog, waiting])
    assert hog.cancelled()
    assert engine.num_unfinished_seqs == 0
    again = await engine.generate(group_of([8, 9], ordinal=3))
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in expected]


async def test_a_group_larger_than_the_engine_is_completed_in_turns(
    make_engine: MakeEngine, tiny_model: ModelSettings
) -> None:
    engine = await make_engine(max_num_seqs=3)
    groups = [group_of([4, 5, 6, 7], ordinal=i, group_size=7, max_tokens=9) for i in range(2)]
    results = await asyncio.gather(*(engine.generate(group) for group in groups))
    for group, completions in zip(groups, results, strict=True):
        assert_exact(load(tiny_model), group, completions)


async def test_tokens_and_unfinished_sequences_are_counted(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    task = asyncio.create_task(engine.generate(group_of([4, 5, 6])))
    await asyncio.sleep(0)
    assert engine.num_unfinished_seqs == 4
    completions = await task
    assert engine.num_unfinished_seqs == 0
    assert engine.num_tokens_generated == sum(len(completion) for completion in completions)


async def test_an_idle_engine_uses_no_processor(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    await engine.generate(group_of([4, 5, 6]))
    before, started = time.process_time(), time.monotonic()
    await asyncio.sleep(0.3)
    assert time.process_time() - before < 0.5 * (time.monotonic() - started)


async def test_closing_ends_what_is_in_flight_and_can_be_repeated(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    task = asyncio.create_task(engine.generate(group_of([4, 5], max_tokens=120, temperature=0.01)))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="not running"):
        await engine.generate(group_of([4, 5]))


async def test_nothing_is_generated_before_the_first_verified_weights(tiny_model: ModelSettings) -> None:
    engine = TransformersEngine(tiny_model, LoraSettings(), GenerationSettings(device="cpu"), seed=0)
    await engine.start()
    assert engine.weight_version is None
    with pytest.raises(EngineError, match="apply_weights comes first"):
        await engine.generate(group_of([4, 5]))
    await engine.close()


async def test_eager_attention_gives_the_same(make_engine: MakeEngine, tiny_model: ModelSettings) -> None:
    engine = await make_engine(model=tiny_model.model_copy(update={"attention": "eager"}))
    groups = [group_of(list(range(4, 6 + 3 * i)), ordinal=i) for i in range(3)]
    for group, completions in zip(
        groups, await asyncio.gather(*(engine.generate(group) for group in groups)), strict=True
    ):
        assert_exact(load(tiny_model), group, completions)
