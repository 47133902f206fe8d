"""An adapter merged into the weights below it is the same policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipeline.config import LoraSettings, ModelSettings
from pipeline.errors import ModelError, WeightError
from pipeline.models.loading import load_model
from pipeline.models.merging import LoraMerger
from pipeline.models.weights import apply_weights
from tests.engines.conftest import load, state_of
from tests.tiny import make_tiny_model
from tests.vllm.history import stepped

IDS = torch.tensor([[4, 5, 6, 7, 8, 9]])


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"], ["lm_head", "embed_tokens", "o_proj"]])
def test_the_merged_model_is_the_adapted_one(tiny_model: ModelSettings, targets: list[str]) -> None:
    lora = LoraSettings(rank=4, alpha=6.0, target_modules=targets)
    merger = LoraMerger(tiny_model, lora)
    trainer, plain = load(tiny_model, lora), load(tiny_model)
    initial = plain(input_ids=IDS).logits
    for version in range(2):
        stepped(trainer, seed=version, amount=0.1)
        apply_weights(plain, merger.merge(state_of(trainer, version)))
        expected = trainer(input_ids=IDS).logits
        assert (expected - initial).abs().max() > 0.1
        torch.testing.assert_close(plain(input_ids=IDS).logits, expected, atol=1e-4, rtol=0)


def test_only_layers_with_an_adapted_module_are_given_again(tiny_model: ModelSettings) -> None:
    lora = LoraSettings(rank=4, target_modules=["model.layers.1.mlp.up_proj"])
    trainer = stepped(load(tiny_model, lora), seed=0, amount=0.1)
    merger = LoraMerger(tiny_model, lora)
    whole = merger.merge(state_of(trainer, 3))
    touched = merger.merge(state_of(trainer, 3), only_touched=True)
    assert whole.weight_version == touched.weight_version == 3
    assert {re.sub(r"(layers[.]\d+).*", r"\1", name) for name in touched.tensors} == {"model.layers.1"}
    assert touched.tensors.keys() == {name for name in whole.tensors if name.startswith("model.layers.1.")}
    assert whole.tensors.keys() == state_of(load(tiny_model), 0).tensors.keys()


def test_sums_are_made_in_full_precision_and_rounded_once(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, seed=3)
    narrow = load_model(
        ModelSettings(path=str(path)),
        LoraSettings(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        seed=0,
        trainable=False,
    )
    narrow.save_pretrained(tmp_path)  # type: ignore[operator]
    model, lora = ModelSettings(path=str(path)), LoraSettings(rank=4)
    trainer = stepped(load(model, lora), seed=0, amount=0.1)
    exact = LoraMerger(model, lora, dtype=torch.float32).merge(state_of(trainer, 1))
    rounded = LoraMerger(model, lora).merge(state_of(trainer, 1))
    for name, tensor in exact.tensors.items():
        assert (tensor.dtype, rounded.tensors[name].dtype) == ("float32", "bfloat16")
        full = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32)
        ours = torch.frombuffer(bytearray(rounded.tensors[name].data), dtype=torch.bfloat16)
        assert torch.equal(full.bfloat16(), ours)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_module_that_shares_its_weights_is_not_merged_into(tmp_path: Path) -> None:
    model = ModelSettings(path=str(make_tiny_model(tmp_path, tie=True)))
    with pytest.raises(ModelError, match=r"adapts (lm_head|model.embed_tokens), which shares its weights"):
        LoraMerger(model, LoraSettings(rank=4, target_modules=["embed_tokens"]))


def test_what_is_no_adapter_is_refused(tiny_model: ModelSettings) -> None:
    merger = LoraMerger(tiny_model, LoraSettings(rank=4))
    with pytest.raises(WeightError, match="kind snapshot"):
        merger.merge(state_of(load(tiny_model), 1))
