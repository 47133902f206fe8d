"""A teacher in this process: its logprobs against a plain forward pass, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import Config
from pipeline.errors import MessageError, ModelError, UsageError
from pipeline.messages import RolloutGroup, SamplingMask
from pipeline.teachers import Teachers, average
from pipeline.teachers.local import LocalTeacher
from tests.learning.builders import Row, make_group
from tests.tiny import VOCABULARY, make_tiny_model

IDS = ([7, 9, 4], [5], [11, 6, 8, 7, 30])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, which reads the same tokens and some more."""
    return make_tiny_model(tmp_path_factory.mktemp("larger"), vocabulary=VOCABULARY + "()", num_layers=3, seed=1)


def config_of(policy: Path, *teachers: dict[str, object], **scoring: object) -> Config:
    named = [{"device": "cpu", "dtype": "float32", **teacher} for teacher in teachers]
    return Config.model_validate({"model": {"path": str(policy)}, "scoring": {"teachers": named, **scoring}})


def rollout_of(*, temperature: float = 1.0, **columns: str) -> RolloutGroup:
    group = make_group([Row(token_ids=ids) for ids in IDS], prompt=[6, 7, 8, 9], temperature=temperature).rollout
    return replace(group, prompt=replace(group.prompt, columns=columns))


def mask_of(kept: list[list[int]]) -> SamplingMask:
    return SamplingMask(
        kept_ids=np.array([number for row in kept for number in row], dtype=np.uint32),
        num_kept=np.array([len(row) for row in kept], dtype=np.uint32),
    )


def plain(model: Path, ids: list[int], temperature: float, kept: list[list[int]] | None = None) -> np.ndarray:
    """By one forward pass of the whole model, token by token."""
    return np.array([row[token] for row, token in zip(plain_rows(model, ids, temperature, kept), ids, strict=True)])


def plain_rows(model: Path, ids: list[int], temperature: float, kept: list[list[int]] | None = None) -> np.ndarray:
    """Of all ids, kept or not, [T, V]."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.tensor([[6, 7, 8, 9, *ids]])).logits[0].double() / temperature
    rows = []
    for place in range(len(ids)):
        row = logits[3 + place]
        allowed = row if kept is None else row[torch.tensor(kept[place])]
        rows.append((row - allowed.logsumexp(0)).numpy())
    return np.array(rows)


@pytest.mark.parametrize("batch_tokens", [1, 17, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_a_plain_pass_at_the_temperature_of_the_sample(
    policy: Path, model: Path, batch_tokens: int, temperature: float
) -> None:
    teachers = Teachers(config_of(policy, {"model": str(model), "batch_tokens": batch_tokens}))
    await teachers.start()
    said = await teachers.lessons(rollout_of(temperature=temperature))
    assert said is not None
    assert [lesson.logprobs.dtype for lesson in said] == [np.float32] * 3
    for lesson, ids in zip(said, IDS, strict=True):
        np.testing.assert_allclose(lesson.logprobs, plain(model, list(ids), temperature), atol=2e-5)


async def test_where_ids_were_cut_off_the_teacher_is_renormalised_over_the_others(policy: Path, model: Path) -> None:
    kept = [[7, 9], [4, 9, 12], [4]]
    rollout = rollout_of()
    first, *others = rollout.completions
    rollout = replace(rollout, completions=(replace(first, sampling_mask=mask_of(kept)), *others))
    teachers = Teachers(config_of(policy, {"model": str(model)}))
    await teachers.start()
    said = await teachers.lessons(rollout)
    assert said is not None
    np.testing.assert_allclose(said[0].logprobs, plain(model, list(IDS[0]), 1.0, kept), atol=2e-5)
    np.testing.assert_allclose(said[2].logprobs, plain(model, list(IDS[2]), 1.0), atol=2e-5)


@pytest.mark.parametrize(("top_k", "batch_tokens"), [(3, 17), (10**6, 10_000)])
async def test_the_likeliest_ids_are_those_of_a_plain_pass(
    policy: Path, model: Path, top_k: int, batch_tokens: int
) -> None:
    kept = [[7, 9], [4, 9, 12], [4]]
    rollout = rollout_of(temperature=0.6)
    first, *others = rollout.completions
    rollout = replace(rollout, completions=(replace(first, sampling_mask=mask_of(kept)), *others))
    config = config_of(policy, {"model": str(model), "batch_tokens": batch_tokens, "top_k": top_k})
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"logprob_chunk_tokens": 2})})
    teachers = Teachers(config)
    await teachers.start()
    said = await teachers.lessons(rollout)
    assert said is not None
    for lesson, ids, limits in zip(said, IDS, (kept, None, None), strict=True):
        (top,) = lesson.top
        expected = plain_rows(model, list(ids), 0.6, limits)
        assert top.token_ids.shape == top.logprobs.shape == (len(ids), min(top_k, expected.shape[1]))
        for place, row in enumerate(expected):
            drawable = range(len(row)) if limits is None else limits[place]
            likeliest = sorted(drawable, key=lambda token: -row[token])[:top_k]
            num_there = len(likeliest)
            assert top.token_ids[place, :num_there].tolist() == likeliest
            np.testing.assert_allclose(top.logprobs[place, :num_there], row[likeliest], atol=2e-5)
            assert (top.logprobs[place, num_there:] == -np.inf).all()
        np.testing.assert_allclose(lesson.logprobs, expected[range(len(ids)), list(ids)], atol=2e-5)


async def test_several_teachers_are_averaged_by_weight_or_chosen_by_a_column(policy: Path, model: Path) -> None:
    two = (
        {"name": "own", "model": str(policy), "weight": 3.0, "top_k": 4},
        {"name": "larger", "model": str(model), "top_k": 2},
    )
    together = Teachers(config_of(policy, *two))
    chosen = Teachers(config_of(policy, *two, teacher_column="by"))
    for teachers in (together, chosen):
        await teachers.start()
    own, larger = plain(policy, list(IDS[0]), 1.0), plain(model, list(IDS[0]), 1.0)
    said = await together.lessons(rollout_of())
    assert said is not None
    np.testing.assert_allclose(said[0].logprobs, (3 * own + larger) / 4, atol=2e-5)
    assert [(top.weight, top.logprobs.shape) for top in said[0].top] == [(3.0, (3, 4)), (1.0, (3, 2))]
    said = await chosen.lessons(rollout_of(by="larger"))
    assert said is not None
    np.testing.assert_allclose(said[0].logprobs, larger, atol=2e-5)
    assert await chosen.lessons(rollout_of(by="")) is None
    assert await chosen.lessons(rollout_of()) is None
    with pytest.raises(MessageError, match=r"'by'.*'stranger'; there are: own, larger"):
        await chosen.lessons(rollout_of(by="stranger"))


def test_a_token_that_one_teacher_excludes_is_excluded_by_the_average() -> None:
    (values,) = average([[np.array([-1.0], np.float32)], [np.array([-np.inf], np.float32)]], [1.0, 1.0])
    assert values[0] == -np.inf


async def test_groups_that_a_teacher_cannot_read_are_named(policy: Path, model: Path) -> None:
    teacher = Teachers(config_of(policy, {"model": str(model)}))
    await teacher.start()
    strange = make_group([Row(token_ids=[4, 999])], prompt=[5]).rollout
    with pytest.raises(MessageError, match=r"token 999.*scoring.teachers\[0\].model"):
        await teacher.lessons(strange)
    with pytest.raises(MessageError, match=r"201 tokens.*is 128"):
        await teacher.lessons(make_group([Row(token_ids=[4] * 200)], prompt=[5]).rollout)


@pytest.mark.parametrize(
    ("vocabulary", "said"),
    [
        (VOCABULARY[1:] + "a", "token 'a', id 4 of model.path, is 50 there"),
        (VOCABULARY[:-1], r"token '\\n', id 50 of model.path, is not there"),
    ],
)
async def test_another_vocabulary_is_refused_by_its_first_token(
    policy: Path, tmp_path: Path, vocabulary: str, said: str
) -> None:
    other = make_tiny_model(tmp_path, vocabulary=vocabulary)
    teacher = LocalTeacher(
        config := config_of(policy, {"model": str(other)}), config.scoring.teachers[0], "scoring.teachers[0]"
    )
    with pytest.raises(ModelError, match=said) as caught:
        await teacher.start()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("scoring.teachers[0].model = ")


async def test_a_directory_that_is_no_model_is_named_by_its_setting(policy: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        teachers = Teachers(config_of(policy, {"model": str(path)}))
        with pytest.raises(UsageError, match=rf"scoring.teachers\[0\].model = {json.dumps(str(path))[1:-1]!r}"):
            await teachers.start()
