"""Weights that are replaced while sequences are being decoded."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from pipeline.config import LoraSettings, ModelSettings
from pipeline.engines.decoding import Decoder
from pipeline.engines.rows import GroupTask
from pipeline.engines.transformers import TransformersEngine
from pipeline.errors import EngineError, WeightError
from pipeline.messages import Completion, VersionSpan
from pipeline.models.loading import load_tokenizer
from pipeline.models.weights import stage_weights, state_checksum
from pipeline.weights import HostTensor, WeightKind
from tests.engines.conftest import MakeEngine, group_of, load, plain_logits, shifted, state_of
from tests.tiny import make_tiny_model

LORA = LoraSettings(rank=4, alpha=8)


def chosen(logits: torch.Tensor, completion: Completion) -> np.ndarray:
    """Logprobs of a completion's tokens at temperature 1."""
    ids = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
    return logits.log_softmax(-1).gather(1, ids)[:, 0].numpy()


def assert_spans_cover(completion: Completion) -> None:
    """Spans start at 0, go on without a gap and end with the last token."""
    starts = [span.first_token for span in completion.spans]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert starts[-1] < len(completion)
    assert len(completion.token_versions) == len(completion)


async def tokens_from(engine: TransformersEngine, count: int) -> None:
    """Until the engine has made `count` more tokens."""
    target = engine.num_tokens_generated + count
    async with asyncio.timeout(180):
        while engine.num_tokens_generated < target:  # noqa: ASYNC110  the engine counts in a thread of its own
            await asyncio.sleep(0.001)


def decoder_for(model: ModelSettings, max_num_seqs: int) -> tuple[Decoder, torch.nn.Module]:
    """A decoder that serves version 0, to be stepped by hand, and its model."""
    served = load(model).requires_grad_(False)
    decoder = Decoder(served, load_tokenizer(model), end_ids=(), max_num_seqs=max_num_seqs)
    decoder.replace_weights([], 0)
    return decoder, served


def test_an_update_between_two_steps_keeps_the_keys_and_changes_the_next_token(tiny_model: ModelSettings) -> None:
    decoder, served = decoder_for(tiny_model, 8)
    old, new = load(tiny_model), shifted(load(tiny_model), 0.1)
    prompt, num_old = [4, 5, 6, 7], 5
    decoder.submit(GroupTask(prompt=group_of(prompt), limit=12))
    for _ in range(num_old):
        decoder.step()
    decoder.replace_weights(stage_weights(served, state_of(new, 3)), 3)
    while decoder.has_work:
        decoder.step()
    ((_, completions),) = decoder.take_outcomes()
    assert not isinstance(completions, EngineError)
    for completion in completions:
        assert completion.spans == (
            VersionSpan(weight_version=0, first_token=0),
            VersionSpan(weight_version=3, first_token=num_old),
        )
        ids = torch.tensor([prompt + completion.token_ids.tolist()])
        split, cache = len(prompt) + num_old - 1, DynamicCache()
        with torch.no_grad():
            before = old(input_ids=ids[:, :split], past_key_values=cache, use_cache=True).logits[0, len(prompt) - 1 :]
            after = new(input_ids=ids[:, split:-1], past_key_values=cache, use_cache=True).logits[0]
        expected = chosen(torch.cat([before, after]), completion)
        np.testing.assert_allclose(completion.generator_logprobs, expected, atol=1e-4)


def test_members_that_join_after_an_update_share_no_prefix_with_the_old_version(tiny_model: ModelSettings) -> None:
    decoder, served = decoder_for(tiny_model, 2)
    new, group = shifted(load(tiny_model), 0.1), group_of([4, 5, 6, 7], group_size=4)
    decoder.submit(GroupTask(prompt=group, limit=6))
    decoder.step()
    decoder.replace_weights(stage_weights(served, state_of(new, 1)), 1)
    while decoder.has_work:
        decoder.step()
    ((_, completions),) = decoder.take_outcomes()
    assert not isinstance(completions, EngineError)
    for completion in completions[2:]:
        assert completion.spans == (VersionSpan(weight_version=1, first_token=0),)
        expected = chosen(plain_logits(new, group, completion), completion)
        np.testing.assert_allclose(completion.generator_logprobs, expected, atol=1e-4)


async def test_sequences_in_flight_survive_many_updates(make_engine: MakeEngine, tiny_model: ModelSettings) -> None:
    engine = await make_engine(max_num_seqs=16)
    trainer = load(tiny_model)
    tasks = [
        asyncio.create_task(engine.generate(group_of([4 + i, 5], ordinal=i, max_tokens=100, temperature=0.7)))
        for i in range(8)
    ]
    for version in range(1, 4):
        await tokens_from(engine, 100)
        seconds = await engine.apply_weights(state_of(shifted(trainer, 0.01, seed=version), version))
        assert seconds >= 0
        assert engine.weight_version == version
    completions = [completion for task in tasks for completion in await task]
    for completion in completions:
        assert_spans_cover(completion)
        assert np.isfinite(completion.generator_logprobs).all()
    assert {version for completion in completions for version in completion.token_versions} == {0, 1, 2, 3}


async def test_after_an_update_the_engine_serves_the_trainers_logits_with_tied_weights(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    settings = ModelSettings(path=str(make_tiny_model(tmp_path / "tied", tie=True)))
    engine, trainer = await make_engine(model=settings), shifted(load(settings), 0.05)
    await engine.apply_weights(state_of(trainer, 1))
    group = group_of([4, 5, 6])
    for completion in await engine.generate(group):
        expected = chosen(plain_logits(trainer, group, completion), completion)
        np.testing.assert_allclose(completion.generator_logprobs, expected, atol=1e-4)
    assert engine.model is not None
    assert state_checksum(engine.model) == state_checksum(trainer)


async def test_a_new_adapter_changes_the_output_and_nothing_else_travels(
    make_engine: MakeEngine, tiny_model: ModelSettings
) -> None:
    engine, trainer = await make_engine(lora=LORA, seed=5), load(tiny_model, LORA, seed=5)
    group = group_of([4, 5, 6])
    before = await engine.generate(group)
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)
    state = state_of(trainer, 1)
    assert state.kind is WeightKind.ADAPTER
    await engine.apply_weights(state)
    after = await engine.generate(group)
    assert [c.token_ids.tolist() for c in before] != [c.token_ids.tolist() for c in after]
    for completion in after:
        expected = chosen(plain_logits(trainer, group, completion), completion)
        np.testing.assert_allclose(completion.generator_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "bytes", "type", "kind", "older"])
async def test_weights_that_do_not_fit_leave_the_old_version_serving(
    make_engine: MakeEngine, tiny_model: ModelSettings, fault: str
) -> None:
    engine = await make_engine()
    await engine.apply_weights(state_of(load(tiny_model), 2))
    expected = await engine.generate(group_of([4, 5, 6]))
    state = state_of(shifted(load(tiny_model), 0.1), 1 if fault == "older" else 3)
    tensors = dict(state.tensors)
    name, tensor = list(tensors.items())[-1]
    data = tensor.data
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["another.weight"] = tensor
    elif fault == "shape":
        tensors[name] = HostTensor(dtype=tensor.dtype, shape=(*tensor.shape, 1), data=data)
    elif fault == "bytes":
        tensors[name] = HostTensor(dtype=tensor.dtype, shape=tensor.shape, data=data[:-4])
    elif fault == "type":
        tensors[name] = HostTensor(dtype="float33", shape=tensor.shape, data=data)
    kind = WeightKind.ADAPTER if fault == "kind" else state.kind
    with pytest.raises(WeightError):
        await engine.apply_weights(dataclasses.replace(state, tensors=tensors, kind=kind))
    assert engine.weight_version == 2
    again = await engine.generate(group_of([4, 5, 6]))
    assert [c.generator_logprobs.tobytes() for c in again] == [c.generator_logprobs.tobytes() for c in expected]
    assert {version for completion in again for version in completion.token_versions} == {2}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_weights_that_are_not_finite_are_refused_and_large_ones_are_not(
    make_engine: MakeEngine, tiny_model: ModelSettings, value: float, dtype: torch.dtype
) -> None:
    engine, trainer = await make_engine(), load(tiny_model).to(dtype)
    name, parameter = list(trainer.named_parameters())[-1]
    with torch.no_grad():
        parameter.fill_(torch.finfo(dtype).max)  # their sum is not finite
    await engine.apply_weights(state_of(trainer, 1))
    with torch.no_grad():
        parameter.view(-1)[3] = value
    with pytest.raises(WeightError, match=f"{re.escape(name)} has values that are not finite"):
        await engine.apply_weights(state_of(trainer, 2))
    assert engine.weight_version == 1


async def test_weights_that_give_no_finite_logits_fail_their_groups_and_the_next_ones_heal_the_engine(
    make_engine: MakeEngine, tiny_model: ModelSettings
) -> None:
    engine = await make_engine()
    expected = await engine.generate(group_of([4, 5, 6]))
    broken = load(tiny_model)
    with torch.no_grad():
        broken.lm_head.weight.sign_().mul_(torch.finfo(torch.float32).max)
    await engine.apply_weights(state_of(broken, 1))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(group_of([4, 5, 6, 7, 8, 9, 10, 11]))
    await engine.apply_weights(state_of(load(tiny_model), 2))
    again = await engine.generate(group_of([4, 5, 6]))
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in expected]


async def test_closing_ends_an_update_that_waits(make_engine: MakeEngine, tiny_model: ModelSettings) -> None:
    engine = await make_engine()
    update = asyncio.create_task(engine.apply_weights(state_of(load(tiny_model), 1)))
    await asyncio.sleep(0)
    await engine.close()
    done, _ = await asyncio.wait([update], timeout=60)
    assert done
    assert update.exception() is None or isinstance(update.exception(), EngineError)


async def test_a_model_that_raises_fails_the_groups_in_flight_and_not_the_engine(
    make_engine: MakeEngine, tiny_model: ModelSettings
) -> None:
    engine = await make_engine()
    with pytest.raises(EngineError, match="IndexError"):
        await engine.generate(group_of([4, 5, 1000]))
    with pytest.raises(EngineError, match="IndexError"):
        await engine.generate(group_of([1000, 5, 4]))
    assert engine.num_unfinished_seqs == 0
    assert len(await engine.generate(group_of([4, 5, 6]))) == 4


def test_a_saved_model_is_the_checkpoint_it_was_loaded_from(tiny_model: ModelSettings) -> None:
    again = AutoModelForCausalLM.from_pretrained(tiny_model.path)
    assert state_checksum(again) == state_checksum(load(tiny_model))
