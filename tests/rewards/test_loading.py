"""Reward functions by name: found, checked, or refused with the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.config import RewardSettings, ScoringSettings
from pipeline.errors import RewardLoadError
from pipeline.rewards import load_rewards
from tests.rewards.pools import reward, rewards_of, rollout, running_pool

SOURCE = "def mine(prompts, completions, **columns):\n    return [7.0] * len(completions)\n"


def refusal(settings: RewardSettings) -> str:
    with pytest.raises(RewardLoadError) as caught:
        load_rewards([settings])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("scoring.rewards")
    return str(caught.value)


def test_a_reward_takes_its_name_from_the_function_or_the_settings() -> None:
    rewards = load_rewards([reward("zero"), reward("scaled", name="bonus", weight=0.5, kwargs={"factor": 2.0})])
    assert [(item.name, item.weight) for item in rewards] == [("zero", 1.0), ("bonus", 0.5)]
    assert rewards[1].kwargs == {"factor": 2.0}


@pytest.mark.parametrize("function", ["an_instance", "a_partial", "concurrently"])
def test_anything_that_can_be_called_like_a_reward_is_one(function: str) -> None:
    assert load_rewards([reward(function)])[0].name == function


async def test_a_file_is_taken_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "my_reward.py").write_text("from beside import mine\n")
    (tmp_path / "rewards" / "beside.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    async with running_pool(RewardSettings(function="rewards/my_reward.py:mine")) as pool:
        assert await rewards_of(pool, rollout("a")) == [7.0]


async def test_a_package_in_the_working_directory_is_found_but_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "rewards.py").write_text(SOURCE)
    (tmp_path / "json.py").write_text("raise RuntimeError('hides the json of Python')\n")
    monkeypatch.chdir(tmp_path)
    async with running_pool(RewardSettings(function="my_package.rewards:mine")) as pool:
        assert await rewards_of(pool, rollout("a")) == [7.0]


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        ("exact_mach", "did you mean exact_match?"),
        ("nothing_like_it", "Shipped are: choice, exact_match, format, json_schema, length, math"),
        ("tests.rewards.samples", "tests.rewards.samples:function_name"),
        ("tests.rewards.samples:num_leters", "did you mean num_letters"),
        ("tests.rewards.samples:CONSTANT", "names a value (int); name a function: def reward("),
        ("tests.rewards.samples:AClass", "is a class"),
        ("tests.rewards.samples:without_columns", "add **columns, as in: def reward(prompts, completions, **columns)"),
        ("tests.rewards.samples:by_position", "takes 'prompts' only by position"),
        ("tests.rewards.samples:generates", "is a generator; return a list"),
        ("no_such_package.rewards:mine", "No module named 'no_such_package'"),
        ("no/such/file.py:mine", "there is no file"),
    ],
)
def test_a_name_that_is_no_reward_is_refused_with_the_way_out(function: str, hint: str) -> None:
    assert hint in refusal(RewardSettings(function=function))


def test_a_setting_that_the_function_does_not_take_names_those_it_takes() -> None:
    problem = refusal(reward("scaled", kwargs={"facter": 2.0}))
    assert "does not take the setting 'facter'; did you mean factor?" in problem
    assert "prompts" not in problem


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("def mine(:\n", "SyntaxError"),
        ("\nraise ValueError('two\\nlines')\n", "ValueError: two lines (REWARD:2)"),
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("import os; os._exit(9)\n", "exited with code 9"),
    ],
)
def test_a_file_that_cannot_be_imported_says_where_it_fails(tmp_path: Path, source: str, hint: str) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(source)
    assert hint.replace("REWARD", str(file)) in refusal(RewardSettings(function=f"{file}:mine"))


def test_no_reward_at_all_is_refused() -> None:
    with pytest.raises(RewardLoadError, match=r"scoring.rewards is empty"):
        load_rewards([])


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(RewardLoadError, match="give one of them another `name`"):
        load_rewards([reward("zero"), reward("zero")])


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1e300])
def test_a_weight_with_which_no_sum_can_be_made_is_refused(weight: float) -> None:
    for kind, item in (("rewards", {"function": "a:b"}), ("judges", {"model": "a"})):
        with pytest.raises(ValidationError, match="weight"):
            ScoringSettings.model_validate({kind: [item | {"weight": weight}]})


async def test_rewards_can_be_loaded_from_within_an_event_loop() -> None:
    assert load_rewards([reward("zero")])[0].name == "zero"


async def test_a_pool_refuses_at_start_and_leaves_no_process() -> None:
    with pytest.raises(RewardLoadError, match="did you mean zero"):
        async with running_pool(reward("zer0"), num_processes=3):
            pytest.fail("it started")


@pytest.mark.parametrize("module", ["workers.scorer", "pipeline.rewards.pool", "pipeline.rewards.child"])
def test_scoring_imports_neither_torch_nor_vllm(module: str) -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'sympy'}"
    code = f"import sys, {module}; sys.exit(str({heavy} & sys.modules.keys()) if {heavy} & sys.modules.keys() else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_scorer_is_small() -> None:
    code = "import sys, psutil, workers.scorer; sys.exit(psutil.Process().memory_info().rss > 110e6)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_reward_process_does_not_even_import_the_settings() -> None:
    light = "import sys, pipeline.rewards.child; sys.exit('pydantic' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", light], check=False).returncode == 0
