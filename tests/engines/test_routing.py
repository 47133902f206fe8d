"""Experts as the transformers engine records them, and the whole way to a trainer that replays them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import Config, ModelSettings
from pipeline.errors import ConfigError
from pipeline.learner import PolicyLearner
from pipeline.messages import Completion, PromptGroup, RolloutGroup, Score, ScoredGroup
from pipeline.wire import decode, encode
from tests.engines.conftest import MakeEngine, group_of, load, state_of
from tests.moe import NUM_EXPERTS, TOP_K, make_tiny_moe, noisy, own_choice, tied, tiny_moe


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    return ModelSettings(path=str(make_tiny_moe(tmp_path_factory.mktemp("moe"))))


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    """Three of six experts, where each router finds them alike in pairs."""
    directory: Path = tmp_path_factory.mktemp("undecided")
    make_tiny_moe(directory, num_experts_per_tok=3)
    tied(tiny_moe(dtype=torch.float32, num_experts_per_tok=3)).save_pretrained(directory)
    return ModelSettings(path=str(directory))


def assert_recorded(model: torch.nn.Module, group: PromptGroup, completions: tuple[Completion, ...]) -> None:
    """Every token that was read went where a plain forward pass sends it."""
    assert len(completions) == group.sampling.group_size
    for completion in completions:
        routed = completion.routed_experts
        assert routed is not None
        assert routed.ids.dtype == np.uint8
        assert routed.num_experts == NUM_EXPERTS
        read = [*group.prompt_token_ids.tolist(), *completion.token_ids.tolist()][:-1]
        expected = own_choice(model, read)
        assert routed.ids.shape == expected.shape == (len(read), 2, TOP_K)
        np.testing.assert_array_equal(np.sort(routed.ids, axis=-1), np.sort(expected, axis=-1))


async def test_experts_are_those_of_a_plain_forward_pass_with_sequences_that_come_and_go(
    make_engine: MakeEngine, moe: ModelSettings
) -> None:
    """Fewer rows than members, so that prompts are read together, kept for later members, and rows move."""
    engine = await make_engine(model=moe, max_num_seqs=6, replay_routing=True)
    lengths = [1, 17, 5, 30, 2]
    groups = [
        group_of(list(range(4, 4 + length)), ordinal=ordinal, max_tokens=6 + 5 * ordinal, keep_routed_experts=True)
        for ordinal, length in enumerate(lengths)
    ]
    plain = group_of([4, 5, 6], ordinal=9)
    *results, unasked = await asyncio.gather(*(engine.generate(group) for group in [*groups, plain]))

    assert all(completion.routed_experts is None for completion in unasked)
    for group, completions in zip(groups, results, strict=True):
        assert_recorded(load(moe), group, completions)


async def test_members_that_join_after_an_update_have_the_new_routers_choice(
    make_engine: MakeEngine, moe: ModelSettings
) -> None:
    engine = await make_engine(model=moe, max_num_seqs=1, replay_routing=True)
    newer = noisy(load(moe), 0.3)  # type: ignore[arg-type]
    group = group_of([4, 5, 6, 7, 8], group_size=4, max_tokens=60, keep_routed_experts=True)
    running = asyncio.create_task(engine.generate(group))
    async with asyncio.timeout(180):
        while engine.num_tokens_generated < 5:  # noqa: ASYNC110  the engine counts in a thread of its own
            await asyncio.sleep(0.001)
    await engine.apply_weights(state_of(newer, 1))
    completions = await running

    late = [completion for completion in completions if completion.spans[0].weight_version == 1]
    assert late
    assert_recorded(newer, replace(group, sampling=replace(group.sampling, group_size=len(late))), tuple(late))


async def test_from_engine_to_trainer_the_ratio_is_one_although_the_routers_would_choose_otherwise(
    make_engine: MakeEngine, undecided: ModelSettings, tmp_path: Path
) -> None:
    """The trainer's router weights are off by 1e-6, which no weight of an expert feels, but every choice does."""
    engine = await make_engine(model=undecided, max_num_seqs=8, replay_routing=True)
    prompts = [group_of([4 + i, 5, 6], ordinal=i, max_tokens=12, keep_routed_experts=True) for i in range(4)]
    results = await asyncio.gather(*(engine.generate(prompt) for prompt in prompts))
    groups = [
        ScoredGroup(
            rollout=RolloutGroup(prompt=prompt, completions=completions, generator="g"),
            scores=tuple(Score(reward=float(index % 2)) for index in range(len(completions))),
            scorer="s",
        )
        for prompt, completions in zip(prompts, results, strict=True)
    ]
    groups = [decode(encode(group), ScoredGroup) for group in groups]
    directory = make_tiny_moe(tmp_path, num_experts_per_tok=3)
    noisy(load(undecided), 1e-6).save_pretrained(directory)  # type: ignore[arg-type]

    ratios = {}
    for replay_routing in (True, False):
        config = Config.model_validate(
            {
                "model": {"path": str(directory)},
                "trainer": {"device": "cpu", "gradient_checkpointing": replay_routing},
                "generation": {"replay_routing": replay_routing},
            }
        )
        learner = PolicyLearner.create(config)
        ratios[replay_routing] = learner.step(groups, trainer_version=0)["importance_ratio_max"]

    assert ratios[True] == pytest.approx(1, abs=1e-3)
    assert ratios[False] > 1.1


async def test_routers_that_are_close_to_undecided_are_no_reason_to_refuse_a_model(
    make_engine: MakeEngine, undecided: ModelSettings
) -> None:
    engine = await make_engine(model=undecided)
    assert all(completion.routed_experts is None for completion in await engine.generate(group_of([4, 5, 6])))


async def test_a_dense_model_is_refused_where_routing_is_to_be_replayed(
    make_engine: MakeEngine, tiny_model: ModelSettings
) -> None:
    with pytest.raises(ConfigError, match=r"'llama' has no router .* set generation.replay_routing = false"):
        await make_engine(replay_routing=True)
    config = Config.model_validate({"model": {"path": tiny_model.path}, "generation": {"replay_routing": True}})
    with pytest.raises(ConfigError, match="'llama' has no router"):
        PolicyLearner.create(config)
