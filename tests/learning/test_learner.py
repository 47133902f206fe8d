"""The loss and its gradient against formulas written here from the papers, and what must not matter (L1-L4, L6)."""

from __future__ import annotations

import numpy as np
import pytest
import structlog
import torch
from transformers import LlamaForCausalLM

from pipeline.config import AlgorithmSettings, StalenessSettings
from pipeline.errors import MessageError
from pipeline.messages import ScoredGroup
from pipeline.weights import WeightKind
from tests.learning.builders import (
    Row,
    gradients,
    make_group,
    make_learner,
    plain_logprobs,
    random_groups,
    tiny_llama,
)
from tests.learning.nucleus import nucleus_group


def paper_loss(
    model: LlamaForCausalLM,
    groups: list[ScoredGroup],
    settings: AlgorithmSettings,
    reference: LlamaForCausalLM | None = None,
) -> torch.Tensor:
    """GRPO as in arXiv 2402.03300 and 2503.14476, one completion at a time, in float64."""
    sequences = []
    for group in groups:
        prompt = group.rollout.prompt
        rewards = np.array([score.reward for score in group.scores])
        for completion, reward in zip(group.rollout.completions, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-6) if rewards.std() > 0 else 0.0
            arguments = (prompt.prompt_token_ids.tolist(), completion.token_ids.tolist(), prompt.sampling.temperature)
            new = plain_logprobs(model, *arguments)
            old = torch.tensor(completion.generator_logprobs.astype(np.float64))
            if settings.correction == "none":
                ratio = torch.exp(new - old)
                clipped = ratio.clip(1 - settings.clip_low, 1 + settings.clip_high)
                tokens = -torch.min(ratio * advantage, clipped * advantage)
            else:
                weight = torch.exp(new.detach() - old).clip(max=settings.truncation)
                tokens = -weight * advantage * torch.exp(new - new.detach())
            if reference is not None:
                gap = plain_logprobs(reference, *arguments).detach() - new
                tokens = tokens + settings.kl_coef * (torch.exp(gap) - gap - 1)
            sequences.append(tokens)
    if settings.aggregation == "sequence_mean":
        return torch.stack([tokens.mean() for tokens in sequences]).mean()
    if settings.aggregation == "sequence_sum":
        return torch.stack([tokens.sum() for tokens in sequences]).mean()
    return torch.cat(sequences).mean()


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("correction", ["tis", "none"])
def test_loss_and_gradient_agree_with_the_paper(correction: str, aggregation: str, kl_coef: float) -> None:
    settings = AlgorithmSettings(correction=correction, aggregation=aggregation, kl_coef=kl_coef, truncation=1.3)
    model, reference = tiny_llama(1), tiny_llama(2) if kl_coef else None
    groups = random_groups(model, temperature=0.8, noise=0.4)
    learner = make_learner(model, algorithm=settings, reference=reference)

    loss, metrics = learner.accumulate(groups, trainer_version=0)
    ours = gradients(model)
    model.zero_grad()
    expected = paper_loss(model, groups, settings, reference)
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-8, atol=1e-11)
    assert (metrics["truncated_fraction"] if correction == "tis" else metrics["clip_fraction"]) > 0.1
    assert (metrics["kl"] > 0) == (kl_coef > 0)


def test_order_of_arrival_gives_bit_for_bit_the_same_weights() -> None:
    weights = []
    for order in (1, -1):
        model = tiny_llama(dtype=torch.float32)
        learner = make_learner(model)
        learner.step(random_groups(tiny_llama())[::order], trainer_version=0)
        weights.append(model.state_dict())

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_equal_weights_have_ratio_one_with_top_p_when_the_mask_is_replayed() -> None:
    model = tiny_llama()

    with structlog.testing.capture_logs() as logs:
        _, metrics = make_learner(model).accumulate([nucleus_group(model, is_replayed=True)], trainer_version=0)

    assert metrics["importance_ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-10)
    assert metrics["unreplayed_tokens"] == 0
    assert not logs


def test_top_p_without_its_mask_is_warned_of_once_and_counted() -> None:
    model = tiny_llama()
    learner = make_learner(model)

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            _, metrics = learner.accumulate([nucleus_group(model, is_replayed=False)], trainer_version=0)

    assert [log["event"] for log in logs] == ["sampling_mask_missing"]
    assert metrics["unreplayed_tokens"] == 12
    assert metrics["importance_ratio_mean"] < 0.99


def test_gradient_that_is_not_finite_never_reaches_the_optimiser() -> None:
    model = tiny_llama()
    groups = random_groups(model)
    learner = make_learner(model)
    learner.step(groups, trainer_version=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    handle = model.lm_head.weight.register_hook(lambda gradient: gradient * torch.nan)

    metrics = learner.step(groups, trainer_version=0)
    handle.remove()

    assert metrics["skipped_steps"] == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert learner.step(groups, trainer_version=0)["skipped_steps"] == 0


def test_batch_with_nothing_to_train_on_changes_nothing() -> None:
    model = tiny_llama()
    learner = make_learner(model)
    learner.step(random_groups(model), trainer_version=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    metrics = learner.step([make_group([Row(token_ids=[4], reward=None)])], trainer_version=0)

    assert (metrics["skipped_steps"], metrics["trained_tokens"], metrics["loss"]) == (1, 0, 0)
    assert metrics["unscored_groups"] == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_batch_of_equal_rewards_leaves_weights_and_moments_as_they_are() -> None:
    model = tiny_llama()
    learner = make_learner(model)
    learner.step(random_groups(model), trainer_version=0)
    before = learner.state_dict()
    equal = [make_group([Row(token_ids=[4, 5], reward=1.0), Row(token_ids=[6], reward=1.0)])]

    metrics = learner.step(equal, trainer_version=0)

    assert (metrics["grad_norm"], metrics["skipped_steps"], metrics["zero_variance_groups"]) == (0, 0, 1)
    after = learner.state_dict()
    assert after["num_steps"] == 2
    for name in ("weights", "adamw"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)


def test_stale_tokens_are_masked_one_by_one_and_the_baseline_keeps_their_completion() -> None:
    """S5: the loss is a mean over the tokens that are left."""
    model = tiny_llama()
    rows = [
        Row(token_ids=[4, 7, 5], reward=1.0, spans=((1, 0), (3, 2))),
        Row(token_ids=[6, 2], reward=0.0, spans=((3, 0),)),
    ]
    staleness = StalenessSettings(max_staleness=1, policy="mask")

    loss, metrics = make_learner(model, staleness=staleness).accumulate([make_group(rows)], trainer_version=3)

    first, second = (plain_logprobs(model, [1, 5, 3], row.token_ids) for row in rows)
    weights = [torch.exp(values.detach() + 1).clip(max=2.0) for values in (first, second)]
    expected = (-weights[0][2] * 1 + weights[1].sum()) * (0.5 / 0.500001) / 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert (metrics["masked_tokens"], metrics["trained_tokens"]) == (2, 3)
    assert (metrics["staleness_max"], metrics["staleness_mean"]) == (2, pytest.approx(4 / 5))


def test_corrected_stale_tokens_are_trained_on_and_counted() -> None:
    model = tiny_llama()
    group = make_group([Row(token_ids=[4, 7], reward=1.0), Row(token_ids=[6], reward=0.0)])

    _, metrics = make_learner(model, staleness=StalenessSettings(max_staleness=1)).accumulate(
        [group], trainer_version=2
    )

    assert (metrics["corrected_tokens"], metrics["masked_tokens"], metrics["trained_tokens"]) == (3, 0, 3)


def test_token_from_the_future_is_an_error() -> None:
    model = tiny_llama()

    with pytest.raises(MessageError, match="follows another trainer"):
        make_learner(model).step([make_group([Row(token_ids=[4], spans=((2, 0),))])], trainer_version=1)


def test_exported_weights_are_a_copy_of_the_model_under_the_given_version() -> None:
    model = tiny_llama(dtype=torch.float32)

    state = make_learner(model).export_weights(7)

    assert (state.weight_version, state.kind) == (7, WeightKind.SNAPSHOT)
    exported = torch.frombuffer(bytearray(state.tensors["lm_head.weight"].data), dtype=torch.float32)
    torch.testing.assert_close(exported.view_as(model.lm_head.weight), model.lm_head.weight.detach(), rtol=0, atol=0)
