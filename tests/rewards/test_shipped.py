"""Rewards that come with the library, called as TRL would call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config import RewardSettings
from pipeline.errors import RewardLoadError
from pipeline.rewards import load_rewards
from pipeline.rewards.functions import SHIPPED
from pipeline.rewards.math import math
from pipeline.rewards.structured import json_schema
from pipeline.rewards.text import choice, exact_match, format, length
from tests.rewards.pools import rewards_of, rollout, running_pool

INTEGER_FIELD = json.dumps({"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}})


def refusal(function: str, **kwargs: object) -> str:
    with pytest.raises(RewardLoadError) as caught:
        load_rewards([RewardSettings.model_validate({"function": function, "kwargs": kwargs})])
    return str(caught.value)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("42", "42", 1.0),
        (" 42\n", 42, 1.0),
        ("43", "42", 0.0),
        ("Yes", "yes", 0.0),
        ("b", ["a", "b"], 1.0),
        ("c", ["a", "b"], 0.0),
        ("", "", 1.0),
        ("x", None, None),
    ],
)
def test_exact_match(completion: str, answer: object, expected: float | None) -> None:
    assert exact_match(["p"], [completion], answer=[answer]) == [expected]


def test_exact_match_reads_chats_other_columns_and_other_cases() -> None:
    chat = [{"role": "assistant", "content": "YES"}]
    assert exact_match(["p"], [chat], answer_column="target", ignore_case=True, target=["yes"]) == [1.0]


def test_exact_match_names_the_columns_there_are_when_its_own_is_missing() -> None:
    with pytest.raises(ValueError, match="needs the data column 'answer'; the data set has: target, task"):
        exact_match(["p"], ["a"], target=["a"], task=["x"])


def test_format_matches_the_whole_completion_or_anywhere() -> None:
    completions = ["<a>1\n2</a>", "so <a>1</a>", "<a>"]
    assert format(["p"] * 3, completions, pattern="<a>.*</a>") == [1.0, 0.0, 0.0]
    assert format(["p"] * 3, completions, pattern="<a>.*</a>", whole=False) == [1.0, 1.0, 0.0]


def test_length_falls_linearly_outside_its_bounds() -> None:
    completions = ["x" * size for size in (0, 1, 2, 3, 4, 5, 6, 7, 9)]
    scores = length(["p"] * 9, completions, unit="characters", at_least=3, at_most=5, slack=1)
    assert scores == [0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]


def test_length_counts_tokens_or_words() -> None:
    assert length(["p"] * 2, ["a b c", "a"], [[1, 2], [1, 2, 3]], at_most=2) == [1.0, 0.0]
    assert length(["p"] * 2, ["a b c", "a"], [[1, 2], [1, 2, 3]], at_most=2, unit="words") == [0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("B", 1.0),
        ("A is wrong, so the answer is (B).", 1.0),
        ("B, no: C", 0.0),
        ("Because", 0.0),
        ("", 0.0),
    ],
)
def test_choice_takes_the_last_option_that_stands_alone(completion: str, expected: float) -> None:
    assert choice(["p"], [completion], answer=["B"]) == [expected]


def test_choice_prefers_the_longer_of_two_options_and_refuses_an_answer_that_is_none() -> None:
    assert choice(["p"], ["very good"], choices=["good", "very good"], answer=["very good"]) == [1.0]
    assert choice(["p"], ["A"], answer=[None]) == [None]
    assert choice(["p"] * 2, ["yes", "red"], choices=[["yes", "no"], ["red"]], answer=["no", "red"]) == [0.0, 1.0]
    with pytest.raises(ValueError, match="'E' is not among choices"):
        choice(["p"], ["A"], answer=["E"])


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "1/2", 1.0),
        ("therefore 0.5", r"\frac12", 1.0),
        ("The answer is 12.", 12, 1.0),
        ("3 apples, then 13", 12, 0.0),
        ("no idea", 12, 0.0),
        ("12", None, None),
        ("12", "", None),
    ],
)
def test_math_compares_values(completion: str, answer: object, expected: float | None) -> None:
    pytest.importorskip("math_verify")
    assert math(["p"], [completion], answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"n": 1}', 1.0),
        ('Here:\n```json\n{"n": 1}\n```\n', 1.0),
        ('{"n": "1"}', 0.0),
        ('{"n": 1', 0.0),
        ('{"n": NaN}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema_accepts_json_of_the_right_shape(completion: str, expected: float) -> None:
    assert json_schema(["p"], [completion], schema=INTEGER_FIELD) == [expected]


def test_json_schema_reads_a_file_or_a_schema_for_each_row(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(INTEGER_FIELD, encoding="utf-8-sig")
    assert json_schema(["p"], ['{"n": 1}'], schema=str(tmp_path / "schema.json")) == [1.0]
    rows = [{"type": "array"}, '{"type": "object"}', None]
    assert json_schema(["p"] * 3, ["[]", "[]", "[]"], schema=rows) == [1.0, 0.0, None]


@pytest.mark.parametrize("function", sorted(SHIPPED))
def test_every_shipped_reward_loads_by_its_name(function: str) -> None:
    kwargs: dict[str, str | int | float | bool | list[str]] = {"pattern": ".*"} if function == "format" else {}
    assert load_rewards([RewardSettings(function=function, kwargs=kwargs)])[0].name == function


@pytest.mark.parametrize(
    ("function", "kwargs", "hint"),
    [
        ("format", {}, "pattern"),
        ("format", {"pattern": "("}, "pattern = '(' is not a regular expression"),
        ("format", {"patern": "x"}, "did you mean pattern?"),
        ("length", {"unit": "pages"}, 'use "tokens", "words" or "characters"'),
        ("length", {"at_least": 5, "at_most": 2}, "at_least = 5 is above at_most = 2"),
        ("choice", {"choices": []}, "choices is empty"),
        ("json_schema", {"schema": "no/file.json"}, "neither JSON nor a file"),
        ("json_schema", {"schema": '{"type": 5}'}, "not a JSON schema"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(function: str, kwargs: dict[str, object], hint: str) -> None:
    assert hint in refusal(function, **kwargs)


@pytest.mark.parametrize(
    ("function", "package", "extra"), [("math", "math_verify", "math"), ("json_schema", "jsonschema", "json")]
)
def test_a_missing_package_names_the_extra(
    function: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('as if it were not installed')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert f"pip install rollstream[{extra}]" in refusal(function)


async def test_a_shipped_reward_scores_in_the_pool() -> None:
    async with running_pool(RewardSettings(function="exact_match", kwargs={"ignore_case": True})) as pool:
        assert await rewards_of(pool, rollout("Yes", "no", columns={"answer": "yes"})) == [1.0, 0.0]
