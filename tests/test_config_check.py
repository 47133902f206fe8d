"""`rollstream config check`: everything that the settings name is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config_check import check
from pipeline.config_files import load_config
from pipeline.errors import ConfigError
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path) -> list[str]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab", "answer": "ba"}) + "\n" for _ in range(3)))
    return [
        f"model.path='{model_dir}'",
        f"data.path='{data}'",
        "generation.max_tokens=8",
        "scoring.rewards=[{function='exact_match'}]",
    ]


def load(settings: list[str], *more: str) -> Config:
    return load_config([], environ={}, overrides=[*settings, *more])


def complaint(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_good_settings_pass(settings: list[str]) -> None:
    check(load(settings))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scoring.rewards=[]", "scoring.rewards"),
        ("scoring.rewards=[{function='nowhere:nothing'}]", "nowhere"),
        ("algorithm.preset=grppo", "algorithm.preset"),
        ("data.path='nowhere.jsonl'", "nowhere.jsonl"),
        ("model.path='./nowhere'", "model.path"),
        ("generation.max_tokens=1000000", "generation.max_tokens"),
        ("generation.replay_routing=true", "'llama' has no router"),
        ("weights.server_secret_key_file='nowhere.key'", "weights.server_secret_key_file"),
    ],
)
def test_what_is_missing_is_named_with_its_setting(override: str, said: str, settings: list[str]) -> None:
    assert said in complaint(load(settings, override))


def test_a_model_without_weights_is_found(settings: list[str], model_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model_dir.iterdir():
        if not file.name.endswith(".safetensors"):
            (bare / file.name).write_bytes(file.read_bytes())
    assert "weights" in complaint(load(settings, f"model.path='{bare}'"))


def test_a_broken_row_names_file_and_row(settings: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "ab"}\n{"prompt": \n')
    text = complaint(load(settings, f"data.path='{broken}'"))
    assert "broken.jsonl" in text
    assert "2" in text


def test_all_problems_are_said_at_once(settings: list[str]) -> None:
    config = load(settings, "scoring.rewards=[]", "data.path='nowhere.jsonl'", "model.path='./nowhere'")
    assert len(complaint(config).splitlines()) >= 3
