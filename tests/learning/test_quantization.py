"""An adapter above weights in 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.learner.policy import PolicyLearner
from pipeline.models.loading import load_model
from tests.learning.builders import random_groups, tiny_llama
from tests.ranks.pairs import config_of
from tests.tiny import make_tiny_model

GROUPS = random_groups(tiny_llama(), noise=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64)


def base_weights(learner: PolicyLearner) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in learner.policy.model.named_parameters() if "base_layer" in name}


def test_an_adapter_above_weights_in_four_bits_has_the_gradient_of_what_they_stand_for(model: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    trainer = {"gradient_checkpointing": True}
    quantized = PolicyLearner.create(config_of(model, trainer=trainer, lora={"rank": 4, "quantization": "nf4"}))
    whole = PolicyLearner.create(config_of(model, lora={"rank": 4}))
    before = {name: value.clone() for name, value in base_weights(quantized).items()}
    num_bytes = [sum(value.nbytes for value in base_weights(one).values()) for one in (quantized, whole)]
    for name, value in base_weights(whole).items():
        ours: Any = base_weights(quantized)[name]
        value.data = functional.dequantize_4bit(ours.data, ours.quant_state)

    for version in range(2):
        metrics, expected = (one.step(GROUPS, trainer_version=version) for one in (quantized, whole))
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)

    assert metrics["grad_norm"] > 0
    assert num_bytes[0] * 8 == num_bytes[1]
    assert quantized.policy.layout == whole.policy.layout
    assert all(torch.equal(value, before[name]) for name, value in base_weights(quantized).items())


def test_generators_have_the_same_four_bits_and_a_checkpoint_goes_on_to_the_last_bit(model: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = config_of(model, lora={"rank": 4, "quantization": "nf4"})
    learner, resumed = PolicyLearner.create(config), PolicyLearner.create(config)
    learner.step(GROUPS, trainer_version=0)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.step(GROUPS, trainer_version=1) == learner.step(GROUPS, trainer_version=1)
    cpu = torch.device("cpu")
    served = load_model(config.model, config.lora, device=cpu, dtype=torch.float32, seed=0, trainable=False)
    theirs = dict(served.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in base_weights(learner).items())


def test_a_missing_package_is_named_with_the_way_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == "bitsandbytes" else found(name, package)
    )
    with pytest.raises(ConfigError, match=r"needs the package bitsandbytes.*rollstream\[qlora\]"):
        PolicyLearner.create(config_of(model, lora={"rank": 4, "quantization": "nf4"}))
