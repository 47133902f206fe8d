"""A teacher's logprobs on their way from a score to the gradient, against formulas written here once more."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.distillation import reverse_kl_advantages
from pipeline.batching import make_samples
from pipeline.config import AlgorithmSettings, StalenessSettings
from pipeline.messages import ScoredGroup
from pipeline.staleness import assess
from pipeline.wire import decode, encode
from tests.learning.builders import Row, gradients, make_group, make_learner, plain_logprobs, tiny_llama
from tests.learning.papers import VERSION, groups_of

KEEP_ALL = StalenessSettings(max_staleness=8)
OPD = AlgorithmSettings(preset="opd")


def taught(groups: list[ScoredGroup], teacher: torch.nn.Module) -> list[ScoredGroup]:
    """The groups as a teacher of their temperature leaves them, after a journey over the wire."""
    result = []
    for group in groups:
        prompt = group.rollout.prompt
        scores = tuple(
            replace(
                score,
                teacher_logprobs=plain_logprobs(
                    teacher, prompt.prompt_token_ids.tolist(), item.token_ids.tolist(), prompt.sampling.temperature
                )
                .detach()
                .numpy()
                .astype(np.float32),
            )
            for item, score in zip(group.rollout.completions, group.scores, strict=True)
        )
        result.append(decode(encode(replace(group, scores=scores)), ScoredGroup))
    return result


def plain_loss(
    model: torch.nn.Module, groups: list[ScoredGroup], *, coefficient: float = 1.0, has_rewards: bool = False
) -> torch.Tensor:
    """Mean over tokens of -min(rho, 2) A log pi, A = log p_T - log pi (+ the GRPO advantage), in float64."""
    rows = []
    for group in groups:
        prompt, rewards = group.rollout.prompt, np.array([score.reward for score in group.scores])
        spread = rewards.std()
        for item, score, reward in zip(group.rollout.completions, group.scores, rewards, strict=True):
            new = plain_logprobs(
                model, prompt.prompt_token_ids.tolist(), item.token_ids.tolist(), prompt.sampling.temperature
            )
            gain = torch.tensor(score.teacher_logprobs.astype(np.float64)) - new.detach()
            outcome = (reward - rewards.mean()) / (spread + 1e-6) if has_rewards and spread else 0.0
            old = torch.tensor(item.generator_logprobs.astype(np.float64))
            weight = torch.exp(new.detach() - old).clip(max=2.0)
            rows.append(-weight * (coefficient * gain + outcome) * new)
    return torch.cat(rows).mean()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (OPD, {}),
        (AlgorithmSettings(preset="opd", distillation_coef=0.3), {"coefficient": 0.3}),
        (AlgorithmSettings(preset="grpo", distillation_coef=0.5), {"coefficient": 0.5, "has_rewards": True}),
    ],
    ids=["alone", "weighed", "added to the reward"],
)
def test_the_gradient_is_that_of_the_formula_for_tokens_of_any_age(
    settings: AlgorithmSettings, expected: dict[str, object]
) -> None:
    model, teacher = tiny_llama(1), tiny_llama(2)
    groups = taught(groups_of(model), teacher)
    for budget in (1, 10**6):
        model.zero_grad()
        learner = make_learner(model, algorithm=settings, staleness=KEEP_ALL, trainer={"micro_batch_tokens": budget})
        _, metrics = learner.accumulate(groups, trainer_version=VERSION)
        ours = gradients(model)
        model.zero_grad()
        plain_loss(model, groups, **expected).backward()
        for name, value in gradients(model).items():
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-9)
    assert metrics["untaught_tokens"] == 0


def test_on_its_own_tokens_the_expected_gradient_is_that_of_the_divergence() -> None:
    """Over all first tokens, each weighed by its probability, sum_y pi(y) A(y) grad log pi(y) = -grad KL(pi || p_T)."""
    model, teacher = tiny_llama(1), tiny_llama(2)
    prompt = torch.tensor([[1, 5, 3]])
    logs = model(input_ids=prompt).logits[0, -1].log_softmax(-1)
    theirs = teacher(input_ids=prompt).logits[0, -1].log_softmax(-1).detach()
    gains = reverse_kl_advantages(theirs, logs)
    (-(logs.detach().exp() * gains * logs).sum()).backward()
    ours = gradients(model)
    model.zero_grad()
    logs = model(input_ids=prompt).logits[0, -1].log_softmax(-1)
    (logs.exp() * (logs - theirs)).sum().backward()
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)


def test_the_metric_is_the_mean_over_taught_tokens_in_all_and_by_age() -> None:
    model, teacher = tiny_llama(1), tiny_llama(2)
    groups = taught(groups_of(model), teacher)
    untaught = replace(groups[0].scores[0], teacher_logprobs=None)
    groups[0] = replace(groups[0], scores=(untaught, *groups[0].scores[1:]))
    _, metrics = make_learner(model, algorithm=OPD, staleness=KEEP_ALL).accumulate(groups, trainer_version=VERSION)

    values: list[tuple[int, float]] = []
    for group in groups:
        prompt = group.rollout.prompt
        for item, score in zip(group.rollout.completions, group.scores, strict=True):
            if score.teacher_logprobs is None:
                continue
            new = plain_logprobs(
                model, prompt.prompt_token_ids.tolist(), item.token_ids.tolist(), prompt.sampling.temperature
            )
            gaps = new.detach().numpy() - score.teacher_logprobs
            values += zip(np.minimum(VERSION - item.token_versions, 3).tolist(), gaps.tolist(), strict=True)
    assert metrics["teacher_kl"] == pytest.approx(np.mean([value for _, value in values]), rel=1e-6)
    for age in {age for age, _ in values}:
        mean = np.mean([value for at, value in values if at == age])
        assert metrics[f"teacher_kl_age_{age}"] == pytest.approx(mean, rel=1e-6)
    assert metrics["untaught_tokens"] == len(groups[0].rollout.completions[0])


def test_tokens_without_a_teacher_teach_nothing_and_keep_their_place() -> None:
    model = tiny_llama()
    row = Row(token_ids=[4, 7], reward=1.0, teacher_logprobs=[-0.5, math.nan])
    other = Row(token_ids=[6, 2], reward=0.0)
    loss, metrics = make_learner(model, algorithm=OPD).accumulate([make_group([row, other])], trainer_version=0)
    ours = gradients(model)
    model.zero_grad()
    new = plain_logprobs(model, [1, 5, 3], [4, 7])
    weight = math.exp(min(float(new[0].detach()) + 1.0, math.log(2.0)))
    (-weight * (-0.5 - new[0].detach()) * new[0] / 4).backward()
    assert math.isfinite(float(loss))
    assert metrics["untaught_tokens"] == 3
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-9)


def test_a_token_that_the_teacher_excludes_counts_twenty_nats() -> None:
    trainer = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    gains = reverse_kl_advantages(torch.tensor([-math.inf, math.nan, -0.25]), trainer)
    assert gains.tolist() == [-20.0, 0.0, 0.75]
    assert not gains.requires_grad


def test_a_completion_without_a_reward_is_trained_where_a_teacher_has_spoken() -> None:
    group = make_group(
        [Row(token_ids=[4, 7], reward=None, teacher_logprobs=[-1.0, -2.0]), Row(token_ids=[5], reward=None)]
    )
    samples = make_samples([group], [assess(group, 0, StalenessSettings())])
    assert [sample.num_tokens for sample in samples] == [2, 0]


def test_m2po_looks_at_the_advantages_that_the_teacher_has_a_part_in() -> None:
    """Its limit comes from the whole step: however that is split, the same tokens are masked."""
    model = tiny_llama(1)
    groups = taught(groups_of(model), tiny_llama(2))
    settings = AlgorithmSettings(preset="opd", correction="m2po", proximal="generator")
    found = []
    for budget in (1, 10**6):
        model.zero_grad()
        learner = make_learner(model, algorithm=settings, staleness=KEEP_ALL, trainer={"micro_batch_tokens": budget})
        _, metrics = learner.accumulate(groups, trainer_version=VERSION)
        found.append((metrics["masked_fraction"], gradients(model)))
    assert found[0][0] == found[1][0] > 0
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], rtol=1e-7, atol=1e-11)


def test_training_with_a_teacher_alone_brings_the_policy_to_it() -> None:
    model, teacher = tiny_llama(1, dtype=torch.float32), tiny_llama(2)
    learner = make_learner(model, algorithm=OPD, trainer={"learning_rate": 3e-2})
    random = torch.Generator().manual_seed(0)
    divergences = []
    for version in range(40):
        with torch.no_grad():
            probabilities = model(input_ids=torch.tensor([[1, 5, 3]])).logits[0, -1].double().softmax(-1)
        drawn = torch.multinomial(probabilities, 64, replacement=True, generator=random).tolist()
        rows = [
            Row(
                token_ids=[token],
                generator_logprobs=[math.log(probabilities[token])],
                spans=((version, 0),),
                teacher_logprobs=plain_logprobs(teacher, [1, 5, 3], [token]).tolist(),
            )
            for token in drawn
        ]
        divergences.append(learner.step([make_group(rows)], trainer_version=version)["teacher_kl"])
    assert np.mean(divergences[-5:]) < 0.1 * np.mean(divergences[:2])
