"""The generalised Jensen-Shannon divergence from teachers, against formulas written here once more in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pipeline.algorithms import TokenInputs, evaluate, resolve_algorithm
from pipeline.algorithms.distillation import generalized_jsd
from pipeline.config import AlgorithmSettings, Config
from pipeline.messages import ScoredGroup, TopLogprobs
from pipeline.settings.problems import disagreements
from pipeline.wire import decode, encode
from tests.learning.builders import (
    VOCABULARY_SIZE,
    Row,
    gradients,
    make_group,
    make_learner,
    tiny_llama,
    with_mask_of,
)
from tests.learning.papers import VERSION, groups_of
from tests.learning.test_distillation import KEEP_ALL, plain_loss, taught

BETAS = (0.0, 0.1, 0.5, 1.0)


def rows_of(model: LlamaForCausalLM, group: ScoredGroup, place: int) -> Tensor:
    """log p of all ids at each token of a completion, by one plain pass, [T, V]."""
    prompt, item = group.rollout.prompt, group.rollout.completions[place]
    ids = torch.tensor([[*prompt.prompt_token_ids.tolist(), *item.token_ids.tolist()]])
    logits = model(input_ids=ids).logits[0, len(prompt.prompt_token_ids) - 1 : -1]
    return (logits / prompt.sampling.temperature).log_softmax(-1)


def top_of(logprobs: Tensor, top_k: int, weight: float = 1.0) -> TopLogprobs:
    """As a teacher sends it."""
    values, ids = logprobs.detach().topk(min(top_k, logprobs.shape[1]))
    return TopLogprobs(
        token_ids=ids.numpy().astype(np.uint32), logprobs=values.numpy().astype(np.float32), weight=weight
    )


def told(groups: Sequence[ScoredGroup], *teachers: tuple[LlamaForCausalLM, int, float]) -> list[ScoredGroup]:
    """The groups with the likeliest ids of teachers (model, top_k, weight), after a journey over the wire."""
    result = []
    for group in taught(list(groups), teachers[0][0]):
        scores = tuple(
            replace(
                score,
                teacher_top=tuple(
                    top_of(rows_of(model, group, place), top_k, weight) for model, top_k, weight in teachers
                ),
            )
            for place, score in enumerate(group.scores)
        )
        result.append(decode(encode(replace(group, scores=scores)), ScoredGroup))
    return result


def kl(first: Tensor, second: Tensor) -> Tensor:
    there = first > 0
    return (first[there] * (first[there] / second[there]).log()).sum()


def jsd(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Of two distributions [K], by the paper's definition; at the ends what they stand for."""
    if beta in {0.0, 1.0}:
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixed = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


def buckets(teacher: np.ndarray, student: Tensor, ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """teacher: logprobs [k] of the ids. student: logprobs [V]. Both as distributions over the ids and all others."""
    theirs, ours = torch.tensor(teacher.astype(np.float64)).exp(), student.exp()[torch.tensor(ids.astype(np.int64))]
    if len(ids) == len(student):
        return theirs, ours
    return torch.cat([theirs, 1 - theirs.sum()[None]]), torch.cat([ours, 1 - ours.sum()[None]])


def divergences(model: LlamaForCausalLM, groups: Sequence[ScoredGroup], beta: float) -> Tensor:
    """Of every token of every completion, one after the other."""
    found = []
    for group in groups:
        for place, score in enumerate(group.scores):
            rows = rows_of(model, group, place)
            total = sum(top.weight for top in score.teacher_top)
            for token, row in enumerate(rows):
                parts = [
                    top.weight / total * jsd(*buckets(top.logprobs[token], row, top.token_ids[token]), beta)
                    for top in score.teacher_top
                ]
                found.append(torch.stack(parts).sum() if parts else row.new_zeros(()))
    return torch.stack(found)


def alone(beta: float, coefficient: float = 1.0) -> AlgorithmSettings:
    return AlgorithmSettings(advantage="none", jsd_coef=coefficient, jsd_beta=beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("top_k", [3, VOCABULARY_SIZE])
def test_loss_and_gradient_are_those_of_the_formula_however_the_step_is_split(beta: float, top_k: int) -> None:
    model = tiny_llama(1)
    groups = told(groups_of(model)[:2], (tiny_llama(2), top_k, 1.0))
    expected = 0.7 * divergences(model, groups, beta).mean()
    expected.backward()
    theirs = gradients(model)
    for budget in (1, 10**6):
        model.zero_grad()
        learner = make_learner(
            model, algorithm=alone(beta, 0.7), staleness=KEEP_ALL, trainer={"micro_batch_tokens": budget}
        )
        loss, metrics = learner.accumulate(groups, trainer_version=VERSION)
        assert float(loss) == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        assert metrics["teacher_jsd"] == pytest.approx(expected.item() / 0.7, rel=1e-5, abs=1e-6)
        for name, value in gradients(model).items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)
    covered = np.concatenate([np.exp(s.teacher_top[0].logprobs).sum(1) for group in groups for s in group.scores])
    assert metrics["teacher_top_mass"] == pytest.approx(float(covered.mean()), rel=1e-6)
    assert metrics["untaught_tokens"] == 0


def test_with_all_ids_it_is_the_divergence_of_the_models_and_with_fewer_never_more() -> None:
    model, teacher = tiny_llama(1), tiny_llama(2)
    groups = groups_of(model)[:1]
    for beta in BETAS:
        whole = torch.stack(
            [
                jsd(theirs.exp(), ours.exp(), beta)
                for group in groups
                for place in range(len(group.scores))
                for theirs, ours in zip(rows_of(teacher, group, place), rows_of(model, group, place), strict=True)
            ]
        ).mean()
        found = []
        for top_k in (1, 4, 9, VOCABULARY_SIZE):
            learner = make_learner(model, algorithm=alone(beta), staleness=KEEP_ALL)
            found.append(float(learner.accumulate(told(groups, (teacher, top_k, 1.0)), trainer_version=VERSION)[0]))
        assert found == sorted(found)
        assert found[-1] == pytest.approx(whole.item(), rel=1e-5)


def test_near_the_ends_it_is_the_kl_divergence_times_the_distance_from_the_end() -> None:
    model = tiny_llama(1)
    groups = told(groups_of(model)[:1], (tiny_llama(2), 4, 1.0))
    for end, near in ((0.0, 1e-5), (1.0, 1 - 1e-5)):
        at_end, beside = (
            float(
                make_learner(model, algorithm=alone(beta), staleness=KEEP_ALL).accumulate(
                    groups, trainer_version=VERSION
                )[0]
            )
            for beta in (end, near)
        )
        assert beside / 1e-5 == pytest.approx(at_end, rel=1e-3)


def test_teachers_count_by_weight_and_rows_without_one_keep_their_place() -> None:
    model = tiny_llama(1)
    groups = told(groups_of(model), (tiny_llama(2), 5, 3.0), (tiny_llama(3), 2, 1.0))
    silent = replace(groups[0].scores[0], teacher_logprobs=None, teacher_top=())
    one_only = replace(groups[0].scores[1], teacher_top=groups[0].scores[1].teacher_top[1:])
    groups[0] = replace(groups[0], scores=(silent, one_only, *groups[0].scores[2:]))
    expected = divergences(model, groups, 0.3)
    num_silent = len(groups[0].rollout.completions[0])
    expected.mean().backward()
    theirs = gradients(model)
    model.zero_grad()
    learner = make_learner(model, algorithm=alone(0.3), staleness=KEEP_ALL, trainer={"micro_batch_tokens": 40})
    loss, metrics = learner.accumulate(groups, trainer_version=VERSION)
    assert float(loss) == pytest.approx(expected.mean().item(), rel=1e-5)
    assert metrics["teacher_jsd"] == pytest.approx(expected.sum().item() / (len(expected) - num_silent), rel=1e-5)
    assert metrics["untaught_tokens"] == num_silent
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)


def test_it_is_added_to_rewards_and_to_the_advantage_of_the_sampled_tokens() -> None:
    model, teacher = tiny_llama(1), tiny_llama(2)
    groups = told(groups_of(model), (teacher, 4, 1.0))
    settings = AlgorithmSettings(distillation_coef=0.5, jsd_coef=0.2, jsd_beta=1.0)
    make_learner(model, algorithm=settings, staleness=KEEP_ALL).accumulate(groups, trainer_version=VERSION)
    ours = gradients(model)
    model.zero_grad()
    plain = plain_loss(model, groups, coefficient=0.5, has_rewards=True)
    (plain + 0.2 * divergences(model, groups, 1.0).mean()).backward()
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


def test_masked_tokens_and_ids_that_could_not_be_drawn_stay_out() -> None:
    """The first token over three ids, two of which the teacher has; the second is not the policy's own."""
    model = tiny_llama(1)
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.array([[0.6, 0.3, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=np.float32))
    top = TopLogprobs(token_ids=np.array([[6, 4, 1], [7, 8, 3], [2, 0, 1]], dtype=np.uint32), logprobs=logprobs)
    row = Row(token_ids=[4, 7, 2], loss_mask=[1, 0, 1], teacher_logprobs=[-1, -1, 0], teacher_top=(top,))
    group = make_group([with_mask_of(row, [[4, 6, 9], [7, 8], [2]])], top_p=0.8)
    for beta in BETAS:
        model.zero_grad()
        loss, metrics = make_learner(model, algorithm=alone(beta)).accumulate([group], trainer_version=0)
        ours = gradients(model)
        logits = model(input_ids=torch.tensor([[1, 5, 3, 4]])).logits[0, 2]
        student = logits[torch.tensor([6, 4, 9])].softmax(0)
        model.zero_grad()
        expected = jsd(torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), student, beta) / 2
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
        assert metrics["teacher_top_mass"] == pytest.approx(0.95)
        for name, value in gradients(model).items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_what_one_of_them_excludes_is_bounded(beta: float) -> None:
    """The teacher is sure, and so is the policy, of something else; both are sure of the same."""
    logits = torch.tensor([[0.0, 200.0, 0.0], [0.0, 1.0, 2.0], [99.0, 0.0, 0.0]], requires_grad=True)
    logs = logits.log_softmax(-1)
    trainer = torch.stack([logs[:, 0], torch.full((3,), -math.inf), logs[:, 1:].logsumexp(1)], dim=1)[:, None]
    teacher = torch.tensor([[[0.0, -math.inf]]] * 3)
    found, mass = generalized_jsd(teacher, trainer, torch.ones(3, 1), beta=beta)
    found.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert mass.tolist() == [1.0] * 3
    assert found[2].item() == pytest.approx(0.0, abs=1e-5)
    assert 0.01 < found[1].item() < found[0].item() <= 100.0


@pytest.mark.parametrize("beta", BETAS)
def test_an_id_that_the_policy_lacks_is_one_of_the_others(beta: float) -> None:
    model = tiny_llama(1)
    top = TopLogprobs(token_ids=np.array([[40, 5]], np.uint32), logprobs=np.log(np.array([[0.5, 0.2]], np.float32)))
    group = make_group([Row(token_ids=[4], teacher_logprobs=[-1.0], teacher_top=(top,))])
    loss, metrics = make_learner(model, algorithm=alone(beta)).accumulate([group], trainer_version=0)
    chance = rows_of(model, group, 0)[0, 5].exp()
    expected = jsd(torch.tensor([0.2, 0.8], dtype=torch.float64), torch.stack([chance, 1 - chance]), beta)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["teacher_top_mass"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("sections", "problems"),
    [
        ({"teachers": [{"model": "m", "top_k": 4}]}, []),
        ({"teachers": []}, ["algorithm.jsd_coef = 1: scoring.teachers is empty"]),
        ({"teachers": [{"model": "m"}]}, ["scoring.teachers[0].top_k = 0 with algorithm.jsd_coef = 1: "]),
        (
            {"teachers": [{"model": "m", "top_k": 12000}, {"model": "n", "top_k": 9000}]},
            ["scoring.teachers: top_k = 21000 in all makes up to 344064000 bytes for a group"],
        ),
        (
            {"teachers": [{"model": "m", "top_k": 12000}, {"model": "n", "top_k": 9000}], "teacher_column": "by"},
            [],
        ),
    ],
)
def test_teachers_that_cannot_be_asked_for_it_are_refused_by_their_setting(
    sections: dict[str, object], problems: list[str]
) -> None:
    config = Config.model_validate({"algorithm": {"advantage": "none", "jsd_coef": 1}, "scoring": sections})
    said = disagreements(config)
    assert len(said) == len(problems)
    assert all(text.startswith(problem) for text, problem in zip(said, problems, strict=True))


def test_ranks_report_of_the_same_names_whatever_teachers_have_said_of_their_micro_batches() -> None:
    algorithm = resolve_algorithm(AlgorithmSettings(preset="opd", jsd_coef=1.0))
    blank = torch.zeros(1, 2)
    inputs = TokenInputs(
        trainer_logprobs=blank,
        generator_logprobs=blank,
        advantages=blank,
        mask=blank == 0,
        ages=blank.long(),
        teacher_jsd=blank,
        teacher_top_mass=blank,
    )
    said, unsaid = evaluate(algorithm, replace(inputs, teacher_logprobs=blank)), evaluate(algorithm, inputs)
    assert said.stats.keys() == unsaid.stats.keys()


def test_training_with_it_alone_brings_the_policy_to_the_teacher() -> None:
    model, teacher = tiny_llama(1, dtype=torch.float32), tiny_llama(2)
    learner = make_learner(model, algorithm=alone(0.5), trainer={"learning_rate": 3e-2})
    group = told([make_group([Row(token_ids=[4, 7, 9]), Row(token_ids=[6])])], (teacher, 4, 1.0))
    found = [learner.step(group, trainer_version=0)["teacher_jsd"] for _ in range(25)]
    assert found[-1] < 0.1 * found[0]
