"""The learner that a configuration names: loading, resuming, saving, adapters, precision."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config import Config
from pipeline.errors import ConfigError, ModelError
from pipeline.learner import Learner, PolicyLearner, load_learner
from pipeline.weights import WeightKind
from tests.learning.builders import random_groups, tiny_llama
from tests.tiny import make_tiny_model

GROUPS = random_groups(tiny_llama(), noise=0.2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make_config(model_dir: Path, **sections: dict[str, Any]) -> Config:
    trainer = {"learning_rate": 1e-2, "device": "cpu", "micro_batch_tokens": 64, "max_steps": 10}
    settings: dict[str, Any] = {"model": {"path": str(model_dir)}, "trainer": trainer}
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return Config.model_validate(settings)


def policy_learner(config: Config) -> PolicyLearner:
    learner = load_learner(config)
    assert isinstance(learner, PolicyLearner)
    return learner


def through_a_file(learner: Learner) -> dict[str, object]:
    """The learner's state as a checkpoint gives it back: no pickled code."""
    buffer = io.BytesIO()
    torch.save(learner.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, object] = torch.load(buffer, weights_only=True)
    return state


def weights_of(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner.policy.model.named_parameters()}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"trainer": {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}},
        {"lora": {"rank": 4, "dropout": 0.3}},
        {"algorithm": {"kl_coef": 0.1, "correction": "none"}},
    ],
    ids=["plain", "schedule", "lora-dropout", "kl"],
)
def test_resumed_learner_goes_on_exactly_as_the_one_that_never_stopped(
    model_dir: Path, sections: dict[str, Any]
) -> None:
    config = make_config(model_dir, **sections)
    first = policy_learner(config)
    for _ in range(2):
        first.step(GROUPS, trainer_version=0)
    state = through_a_file(first)
    expected = [first.step(GROUPS, trainer_version=0) for _ in range(2)]

    resumed = policy_learner(config)
    resumed.load_state_dict(state)
    metrics = [resumed.step(GROUPS, trainer_version=0) for _ in range(2)]

    assert metrics == expected
    before, after = weights_of(first), weights_of(resumed)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_is_not_changed_by_later_steps(model_dir: Path) -> None:
    learner = policy_learner(make_config(model_dir))
    learner.step(GROUPS, trainer_version=0)
    state, before = learner.state_dict(), through_a_file(learner)

    learner.step(GROUPS, trainer_version=0)

    assert_same(state, before)


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_a_snapshot_is_written_as_it_was_while_training_goes_on(
    model_dir: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    learner = policy_learner(make_config(model_dir, **sections))
    learner.step(GROUPS, trainer_version=0)
    for name in ("then", "later"):
        (tmp_path / name).mkdir()
    learner.save_model(tmp_path / "then")
    snapshot = learner.snapshot()
    learner.step(GROUPS, trainer_version=1)
    snapshot.save_model(tmp_path / "later")
    (file,) = (path.name for path in (tmp_path / "then").glob("*.safetensors"))
    then, later = load_file(tmp_path / "then" / file), load_file(tmp_path / "later" / file)
    assert then.keys() == later.keys()
    assert all(torch.equal(then[name], later[name]) for name in then)
    goes_on = policy_learner(make_config(model_dir, **sections))
    goes_on.load_state_dict(snapshot.state_dict())
    goes_on.step(GROUPS, trainer_version=1)
    assert_same(weights_of(goes_on), weights_of(learner))


def assert_same(one: object, other: object) -> None:
    """Two nests of dicts, lists, tensors and numbers are equal."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other)
        return
    if isinstance(one, dict | list):
        assert isinstance(other, dict | list)
        keys = one if isinstance(one, dict) else range(len(one))
        assert len(one) == len(other)
        for key in keys:
            assert_same(one[key], other[key])  # type: ignore[index]
        return
    assert one == other


def test_state_of_another_model_is_refused(model_dir: Path) -> None:
    state = policy_learner(make_config(model_dir, lora={"rank": 4})).state_dict()

    with pytest.raises(ModelError, match="the checkpoint is of another model"):
        policy_learner(make_config(model_dir, lora={"rank": 8})).load_state_dict(state)


def test_saved_model_loads_with_its_tokenizer_and_equals_the_trained_one(model_dir: Path, tmp_path: Path) -> None:
    learner = policy_learner(make_config(model_dir))
    learner.step(GROUPS, trainer_version=0)

    learner.save_model(tmp_path / "model")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("abc")
    for name, value in learner.policy.model.state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("rank", [0, 4], ids=["model", "adapter"])
def test_who_may_read_a_saved_model_is_for_the_umask_to_say(
    model_dir: Path, tmp_path: Path, umask: int, rank: int
) -> None:
    learner = policy_learner(make_config(model_dir, lora={"rank": rank}))
    before = os.umask(umask)
    try:
        learner.save_model(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert any(name.endswith(".safetensors") for name in modes)
    assert set(modes.values()) == {0o666 & ~umask}


def test_only_the_adapter_is_trained_exported_and_saved(model_dir: Path, tmp_path: Path) -> None:
    learner = policy_learner(make_config(model_dir, lora={"rank": 4}))
    before = weights_of(learner)

    metrics = learner.step(GROUPS, trainer_version=0)
    state = learner.export_weights(1)
    learner.save_model(tmp_path / "adapter")

    changed = {name for name, value in weights_of(learner).items() if not torch.equal(value, before[name])}
    assert metrics["grad_norm"] > 0
    assert changed
    assert all("lora_" in name for name in changed)
    assert state.kind is WeightKind.ADAPTER
    assert all("lora_" in name for name in state.tensors)
    restored = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "adapter")
    after = weights_of(learner)
    for name, value in restored.named_parameters():
        torch.testing.assert_close(value, after[name], rtol=0, atol=0)


def test_divergence_from_the_initial_policy_is_zero_at_first_and_then_grows(model_dir: Path) -> None:
    for lora in ({}, {"rank": 4}):
        learner = policy_learner(make_config(model_dir, algorithm={"kl_coef": 1e-3}, lora=lora))

        divergences = [learner.step(GROUPS, trainer_version=0)["kl"] for _ in range(3)]

        assert divergences[0] == 0
        assert divergences[2] > 0


def test_divergence_is_measured_from_the_initial_policy_after_a_resume(model_dir: Path) -> None:
    config = make_config(model_dir, algorithm={"kl_coef": 1e-3})
    learner = policy_learner(config)
    learner.step(GROUPS, trainer_version=0)

    resumed = policy_learner(config)
    resumed.load_state_dict(learner.state_dict())

    assert resumed.step(GROUPS, trainer_version=0)["kl"] > 0


def test_bfloat16_keeps_float32_weights_and_sends_bfloat16(model_dir: Path, tmp_path: Path) -> None:
    learner = policy_learner(make_config(model_dir, trainer={"dtype": "bfloat16"}))
    exact = policy_learner(make_config(model_dir))

    metrics, expected = learner.step(GROUPS, trainer_version=0), exact.step(GROUPS, trainer_version=0)
    learner.save_model(tmp_path / "model")

    assert {value.dtype for value in learner.policy.model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in learner.export_weights(1).tensors.values()} == {"bfloat16"}
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=0.05)
    assert metrics["loss"] != expected["loss"]
    wide = policy_learner(make_config(model_dir, trainer={"dtype": "bfloat16", "head_dtype": "float32"}))
    assert wide.step(GROUPS, trainer_version=0)["loss"] not in {metrics["loss"], expected["loss"]}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    for name, value in learner.policy.model.state_dict().items():
        torch.testing.assert_close(saved[name], value.bfloat16(), rtol=0, atol=0)


def test_adapter_over_bfloat16_weights_is_trained_in_float32(model_dir: Path, tmp_path: Path) -> None:
    sections = {"lora": {"rank": 4}, "trainer": {"dtype": "bfloat16", "gradient_checkpointing": True}}
    learner = policy_learner(make_config(model_dir, algorithm={"kl_coef": 0.1}, **sections))

    metrics = learner.step(GROUPS, trainer_version=0)
    learner.save_model(tmp_path / "adapter")

    trained = [value for value in learner.policy.model.parameters() if value.requires_grad]
    frozen = [value for value in learner.policy.model.parameters() if not value.requires_grad]
    assert {value.dtype for value in trained} == {torch.float32}
    assert torch.bfloat16 in {value.dtype for value in frozen}
    assert (metrics["kl"], metrics["skipped_steps"]) == (0, 0)
    assert {tensor.dtype for tensor in learner.export_weights(1).tensors.values()} == {"bfloat16"}
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "adapter")


def test_gradient_checkpointing_changes_nothing_but_memory(model_dir: Path) -> None:
    for lora in ({}, {"rank": 4}):
        plain = policy_learner(make_config(model_dir, lora=lora))
        thrifty = policy_learner(make_config(model_dir, lora=lora, trainer={"gradient_checkpointing": True}))

        expected, metrics = plain.step(GROUPS, trainer_version=0), thrifty.step(GROUPS, trainer_version=0)

        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_impossible_settings_are_refused_with_their_name(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = 'gae' is not known"):
        load_learner(make_config(model_dir, algorithm={"advantage": "gae"}))
    with pytest.raises(ConfigError, match=r"trainer\.schedule = 'linear' needs to know the last step"):
        load_learner(make_config(model_dir, trainer={"schedule": "linear", "max_steps": 0}))
