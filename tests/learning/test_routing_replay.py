"""Replay of the generator's experts, against a forward pass that is written out expert by expert (tests/moe.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import structlog
import torch
from torch import Tensor

from pipeline.batching import MicroBatch, make_samples, pad, split
from pipeline.config import AlgorithmSettings, StalenessSettings, TrainerSettings
from pipeline.errors import ConfigError, MessageError, ModelError
from pipeline.learner.building import _enable_checkpointing
from pipeline.learner.policy import PolicyLearner
from pipeline.messages import RoutedExperts, ScoredGroup
from pipeline.models.routing import RoutingReplay
from pipeline.policy import Policy
from pipeline.staleness import assess
from pipeline.wire import decode, encode
from tests.learning.builders import Row, gradients, make_group, tiny_llama
from tests.moe import NUM_EXPERTS, forced_logprobs, noisy, own_choice, routers, tied, tiny_moe

KINDS = ["qwen3_moe", "olmoe"]
TEMPERATURE = 0.7
TOLERANCE = 1e-5  # routers compute their softmax in float32, whatever the model's precision


def recorded_groups(generator: Any, *, has_logprobs: bool = True) -> list[ScoredGroup]:
    """Random ids of uneven length with what `generator` makes of them: logprobs, and its routers' choice."""
    random = np.random.default_rng(0)
    groups = []
    for ordinal in range(3):
        prompt = random.integers(3, 50, random.integers(1, 6)).tolist()
        rows = []
        for _ in range(3):
            ids = random.integers(3, 50, random.integers(1, 9)).tolist()
            experts = own_choice(generator, [*prompt, *ids][:-1])
            logprobs = forced_logprobs(generator, prompt, ids, experts, TEMPERATURE) if has_logprobs else None
            rows.append(
                Row(
                    token_ids=ids,
                    reward=float(random.integers(0, 3)),
                    generator_logprobs=None if logprobs is None else logprobs.tolist(),
                    routed_experts=RoutedExperts(ids=experts.astype(np.uint8), num_experts=NUM_EXPERTS),
                )
            )
        group = make_group(rows, ordinal=ordinal, prompt=prompt, temperature=TEMPERATURE)
        groups.append(decode(encode(group), ScoredGroup))
    return groups


def without_record(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    stripped = []
    for group in groups:
        completions = tuple(replace(item, routed_experts=None) for item in group.rollout.completions)
        stripped.append(replace(group, rollout=replace(group.rollout, completions=completions)))
    return stripped


def micro_batches(groups: Sequence[ScoredGroup], budget: int = 10**6) -> list[MicroBatch]:
    samples = make_samples(groups, [assess(group, 0, StalenessSettings()) for group in groups])
    return [
        pad([samples[row] for row in rows], torch.ones(len(rows)), torch.ones(len(rows)))
        for rows in split(samples, budget)
    ]


def expected_rows(model: Any, groups: Sequence[ScoredGroup]) -> list[Tensor]:
    """Forced logprobs of every completion, longest sequence first as `split` has them."""
    rows = []
    for group in groups:
        prompt = group.rollout.prompt.prompt_token_ids.tolist()
        for item in group.rollout.completions:
            assert item.routed_experts is not None
            values = forced_logprobs(model, prompt, item.token_ids.tolist(), item.routed_experts.ids, TEMPERATURE)
            rows.append((len(prompt) + len(item), values))
    return [values for _, values in sorted(rows, key=lambda row: -row[0])]


def trained_rows(policy: Policy, batches: Sequence[MicroBatch]) -> list[Tensor]:
    return [row[mask] for b in batches for row, mask in zip(policy.logprobs(b), b.mask, strict=True)]


def replaying(model: Any, *, chunk_tokens: int = 5) -> Policy:
    return Policy(model, logprob_chunk_tokens=chunk_tokens, replay=RoutingReplay(model))


def make_learner(policy: Policy, **algorithm: object) -> PolicyLearner:
    return PolicyLearner(
        policy,
        algorithm=AlgorithmSettings.model_validate(algorithm),
        trainer=TrainerSettings.model_validate({"learning_rate": 1e-2, "micro_batch_tokens": 40}),
        staleness=StalenessSettings(),
    )


def largest_gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk_tokens", "budget"), [(1, 1), (7, 30), (1000, 10**6)])
def test_replayed_logprobs_are_those_of_the_recorded_experts(kind: str, chunk_tokens: int, budget: int) -> None:
    """The trainer's routers would choose otherwise: they are off by noise."""
    generator = tiny_moe(kind)
    trainer = noisy(generator, 0.1)
    groups = recorded_groups(generator)
    expected = expected_rows(trainer, groups)
    policy = replaying(trainer, chunk_tokens=chunk_tokens)

    rows = trained_rows(policy, micro_batches(groups, budget))
    free = trained_rows(policy, micro_batches(without_record(groups), budget))

    assert policy.is_chunked
    assert largest_gap(rows, expected) < TOLERANCE
    assert largest_gap(free, expected) > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_equal_weights_have_ratio_one(kind: str) -> None:
    model = tiny_moe(kind)
    groups = recorded_groups(model)

    _, metrics = make_learner(replaying(model)).accumulate(groups, trainer_version=0)

    assert metrics["importance_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-10)
    assert metrics["unrouted_tokens"] == 0


def test_noise_that_only_decides_between_experts_leaves_the_ratio_at_one() -> None:
    """Router weights differ by 1e-7, logits by no more; without the record that moves the ratio far from 1."""
    generator = tied(tiny_moe(num_experts_per_tok=3))
    groups = recorded_groups(noisy(generator, 1e-7, seed=1))
    trainer = noisy(generator, 1e-7, seed=2)

    _, replayed = make_learner(replaying(trainer)).accumulate(groups, trainer_version=0)
    _, free = make_learner(Policy(trainer, logprob_chunk_tokens=5)).accumulate(groups, trainer_version=0)

    assert replayed["importance_ratio_max"] == pytest.approx(1, abs=1e-4)
    assert replayed["mismatch_kl"] == pytest.approx(0, abs=1e-8)
    assert free["importance_ratio_max"] > 1.2
    assert free["mismatch_kl"] > 1e-3


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_recorded_experts_and_reaches_the_routers(kind: str, is_checkpointed: bool) -> None:
    generator = tiny_moe(kind)
    trainer = noisy(generator, 0.1)
    groups = recorded_groups(generator)
    weights = [torch.linspace(-1, 1, len(row), dtype=torch.float64) for row in expected_rows(trainer, groups)]
    sum((row * w).sum() for row, w in zip(expected_rows(trainer, groups), weights, strict=True)).backward()
    expected = gradients(trainer)
    trainer.zero_grad()
    replay = RoutingReplay(trainer)
    if is_checkpointed:
        _enable_checkpointing(trainer, replay)
    policy = Policy(trainer, logprob_chunk_tokens=5, replay=replay)

    rows = trained_rows(policy, micro_batches(groups))
    sum((row * w).sum() for row, w in zip(rows, weights, strict=True)).backward()

    for name, value in gradients(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=TOLERANCE)
    assert all(router.weight.grad.abs().max() > 1e-3 for router in routers(trainer))


def test_checkpointing_remembers_each_passes_own_record() -> None:
    """A pass without a record comes between forward and backward, as the reference of the KL term does."""
    generator = tiny_moe()
    trainer = noisy(generator, 0.1)
    groups = recorded_groups(generator)
    replay = RoutingReplay(trainer)
    policy = Policy(trainer, logprob_chunk_tokens=5, replay=replay)
    [batch], [bare] = micro_batches(groups), micro_batches(without_record(groups))
    (policy.logprobs(batch).sum() + policy.logprobs(bare).square().sum()).backward()
    expected = gradients(trainer)
    trainer.zero_grad()
    _enable_checkpointing(trainer, replay)
    policy = Policy(trainer, logprob_chunk_tokens=5, replay=replay)

    (policy.logprobs(batch).sum() + policy.logprobs(bare).square().sum()).backward()

    for name, value in gradients(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


def test_what_was_not_recorded_is_left_to_the_trainers_routers_and_counted() -> None:
    generator = tiny_moe()
    trainer = noisy(generator, 0.1)
    groups = recorded_groups(generator)
    mixed = [groups[0], *without_record(groups[1:])]
    learner = make_learner(replaying(trainer))

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            _, metrics = learner.accumulate(mixed, trainer_version=0)
    [batch] = micro_batches(mixed)
    rows = dict(zip([tuple(r.tolist()) for r in batch.input_ids], learner.policy.logprobs(batch), strict=True))

    assert [log["event"] for log in logs] == ["routed_experts_missing"]
    assert metrics["unrouted_tokens"] == sum(len(c) for group in mixed[1:] for c in group.rollout.completions)
    for group, is_recorded in zip(mixed, [True, False, False], strict=True):
        prompt = group.rollout.prompt.prompt_token_ids.tolist()
        for item in group.rollout.completions:
            ids = item.token_ids.tolist()
            choice = item.routed_experts.ids if item.routed_experts else own_choice(trainer, [*prompt, *ids][:-1])
            padding = [0] * (batch.input_ids.shape[1] - len(prompt) - len(ids))
            ours = rows[(*prompt, *ids, *padding)][: len(ids)]
            expected = forced_logprobs(trainer, prompt, ids, choice, TEMPERATURE)
            assert largest_gap([ours], [expected]) < TOLERANCE, is_recorded


def adapted(model: Any, target_modules: object) -> peft.PeftModel:
    """The model with a random adapter."""
    settings = peft.LoraConfig(r=2, target_modules=target_modules, task_type="CAUSAL_LM", init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, settings).double()


@pytest.mark.filterwarnings("ignore:The following \\w+_pattern keys")  # of peft, about what it does not adapt
def test_an_adapter_on_the_routers_is_in_what_the_experts_weigh() -> None:
    """peft wraps routers too; replaying what the adapted routers choose anyway changes nothing."""
    wrapped = adapted(tiny_moe(), "all-linear")
    groups = recorded_groups(wrapped, has_logprobs=False)
    policy = replaying(wrapped)
    [batch], [bare] = micro_batches(groups), micro_batches(without_record(groups))

    torch.testing.assert_close(policy.logprobs(batch), policy.logprobs(bare))
    policy.logprobs(batch).sum().backward()

    reached = {name for name, value in gradients(wrapped).items() if ".gate." in name and value.abs().max() > 0}
    assert len(reached) == 4, "two matrices in each of two routers"


def test_the_reference_uses_the_experts_that_its_own_routers_choose() -> None:
    generator = tiny_moe()
    trainer = noisy(generator, 0.1)
    base = noisy(generator, 0.1)
    wrapped = adapted(trainer, ["q_proj", "v_proj", "lm_head"])
    groups = recorded_groups(generator)
    [batch], [bare] = micro_batches(groups), micro_batches(without_record(groups))
    policy = replaying(wrapped)

    assert torch.allclose(policy.reference_logprobs(batch), Policy(base, logprob_chunk_tokens=5).logprobs(bare))
    assert largest_gap(trained_rows(policy, [batch]), expected_rows(wrapped.get_base_model(), groups)) < TOLERANCE


def test_experts_of_another_model_are_refused() -> None:
    groups = recorded_groups(tiny_moe())
    [batch] = micro_batches(groups)
    wider = tiny_moe(num_experts_per_tok=3)
    with pytest.raises(MessageError, match="2 layers, 2 of 6 experts; the trainer's has 2 layers, 3 of 6 experts"):
        replaying(wider).evaluate(batch)
    with pytest.raises(MessageError, match="unlike models"):
        micro_batches([*groups, *recorded_groups(wider)])


def test_a_model_without_known_routers_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'llama' has no router .* set generation.replay_routing = false"):
        RoutingReplay(tiny_llama())
    with pytest.raises(ConfigError, match="no layer with a router"):
        RoutingReplay(tiny_moe(mlp_only_layers=[0, 1, 2]))


def test_routers_that_weigh_in_another_way_are_refused() -> None:
    model = tiny_moe()
    for router in routers(model):
        router.register_forward_hook(lambda _m, _a, output: (output[0], output[1] * 2, output[2]))
    with pytest.raises(ModelError, match="another way"):
        RoutingReplay(model)
