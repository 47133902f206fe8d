"""Mixtures of experts on real vLLM: their weights change with the others, and it says which experts it used.

vLLM records experts in its second model runner only, which needs Triton; where it has none (the
wheels for CPUs), what depends on it is skipped, and the engine says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from pipeline.engines.vllm import VllmEngine
from pipeline.engines.vllm_outputs import Draft, Segment
from pipeline.errors import ConfigError, EngineError
from pipeline.messages import FinishReason
from tests.engines.conftest import group_of
from tests.moe import NUM_EXPERTS, TOP_K, make_tiny_moe, own_choice
from tests.vllm.conftest import largest_gap, started, trainer_model
from tests.vllm.history import History

TOLERANCE = 1e-4

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with heads of 32, whose middle layer has no router."""
    directory = tmp_path_factory.mktemp("moe")
    return make_tiny_moe(directory, hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def history(moe_path: Path) -> History:
    return History(trainer_model(moe_path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recording(
    moe_path: Path, history: History, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmEngine]:
    """Records experts, where this vLLM can."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        try:
            async with started(moe_path, replay_routing=True) as engine:
                await engine.apply_weights(history.next())
                yield engine
        except ConfigError as error:
            pytest.skip(str(error))


async def test_experts_follow_every_update(moe_path: Path) -> None:
    history = History(trainer_model(moe_path))
    async with started(moe_path) as engine:
        for number in range(3):
            await engine.apply_weights(history.next())
            group = group_of([5, 6, 7, 8], ordinal=number)
            assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE


async def test_a_vllm_that_cannot_record_experts_is_refused_with_the_way_out(
    moe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ConfigError, match=r"here: .* requires Model Runner V2.*[^.]; set generation.engine = "):
        async with started(moe_path, replay_routing=True):
            pass


async def test_experts_are_those_that_transformers_chooses(recording: VllmEngine, history: History) -> None:
    """The second group finds its prompt in the cache, and still has the experts of all that was read."""
    prompt = [4 + number % 40 for number in range(50)]
    for ordinal in range(2):
        group = group_of(prompt, ordinal=ordinal, keep_routed_experts=True)
        for completion in await recording.generate(group):
            read = [*prompt, *completion.token_ids.tolist()][:-1]
            expected = own_choice(history.model(0), read)
            assert completion.routed_experts is not None
            assert completion.routed_experts.num_experts == NUM_EXPERTS
            assert completion.routed_experts.ids.shape == (len(read), 2, TOP_K)
            np.testing.assert_array_equal(np.sort(completion.routed_experts.ids, -1), np.sort(expected, -1))


def _segment(token_ids: list[int], experts: np.ndarray[Any, Any] | None, finish_reason: str) -> Segment:
    """Of what vLLM really answers with."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput

    logprobs = FlatLogprobs()
    for token in token_ids:
        logprobs.append_fast([token], [-1.0], iter([1]), [None])
    output = CompletionOutput(
        index=0,
        text="",
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        routed_experts=experts,
        finish_reason=finish_reason,
    )
    return Segment.of(output, adapter_version=3)


def _experts(first: int, end: int) -> np.ndarray[Any, Any]:
    """Of three layers; the second has no router, and vLLM fills its place with zeros."""
    rows = np.arange(first, end, dtype=np.uint8)[:, None, None] + np.array([[[0], [100], [50]]], dtype=np.uint8)
    rows = np.repeat(rows, 2, axis=2)
    rows[:, 1] = 0
    return rows


async def test_the_experts_of_all_segments_become_those_of_the_layers_with_routers() -> None:
    draft = Draft(num_prompt_tokens=4, routing=(256, (0, 2)))
    draft.append(_segment([], None, "abort"))
    assert draft.num_routed == 0
    draft.append(_segment([9, 8], _experts(0, 5), "abort"))
    assert draft.num_routed == 5, "the second token was drawn and not read"
    draft.append(_segment([7], _experts(5, 6), "stop"))

    routed = draft.completion(FinishReason.STOP, "").routed_experts

    assert routed is not None
    assert routed.ids.dtype == np.uint8
    assert routed.ids.tolist() == [[[t, t], [50 + t, 50 + t]] for t in range(6)]


async def test_experts_that_vllm_leaves_out_are_missed() -> None:
    draft = Draft(num_prompt_tokens=4, routing=(256, (0, 2)))
    draft.append(_segment([9, 8], _experts(0, 4), "stop"))
    with pytest.raises(EngineError, match="experts of 4 tokens, 5 were read"):
        draft.completion(FinishReason.STOP, "")


async def test_experts_that_nobody_asked_for_are_left_out() -> None:
    draft = Draft(num_prompt_tokens=4)
    draft.append(_segment([9, 8], _experts(0, 5), "stop"))
    assert draft.completion(FinishReason.STOP, "").routed_experts is None
