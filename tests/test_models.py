"""Loading, exporting and replacing the policy's weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from pipeline.config import LoraSettings, ModelSettings
from pipeline.engines.architecture import check_architecture, end_token_ids
from pipeline.errors import ConfigError, ModelError
from pipeline.models.loading import (
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from pipeline.models.weights import (
    apply_weights,
    export_weights,
    num_weight_bytes,
    state_checksum,
    tensors_checksum,
    weight_kind,
)
from pipeline.weights import HostTensor, WeightKind, WeightState
from tests.tiny import make_tiny_model, make_tokenizer

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
LORA = LoraSettings(rank=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), tie=True)


def load(
    path: Path | str, lora: LoraSettings | None = None, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> torch.nn.Module:
    return load_model(
        ModelSettings(path=str(path)), lora or LoraSettings(), device=CPU, dtype=dtype, seed=seed, trainable=True
    )


def state(tensors: dict[str, HostTensor], kind: WeightKind = WeightKind.SNAPSHOT) -> WeightState:
    return WeightState(weight_version=1, kind=kind, tensors=tensors)


def test_every_tensor_travels_once_and_arrives_bit_for_bit(checkpoint: Path) -> None:
    source, target = load(checkpoint), load(checkpoint)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter))
    tensors = export_weights(source)
    assert len(tensors) == len(list(source.parameters()))
    assert "lm_head.weight" not in tensors
    apply_weights(target, state(tensors))
    assert state_checksum(target) == state_checksum(source) == tensors_checksum(tensors)
    ids = torch.arange(4, 12)[None]
    assert torch.equal(target(input_ids=ids).logits, source(input_ids=ids).logits)


def test_bfloat16_travels_and_float32_is_rounded_where_the_model_is_bfloat16(checkpoint: Path) -> None:
    source, target = load(checkpoint), load(checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.01)
    apply_weights(target, state(export_weights(source)))
    rounded = export_weights(source, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in rounded.values()} == {"bfloat16"}
    assert state_checksum(target) == tensors_checksum(rounded)


def test_tensors_of_the_host_are_exported_without_a_copy_and_converted_ones_are_copies(checkpoint: Path) -> None:
    model = load(checkpoint)
    views, copies = export_weights(model), export_weights(model, dtype=torch.bfloat16)
    before, copied = tensors_checksum(views), tensors_checksum(copies)
    assert num_weight_bytes(model) == sum(tensor.data.nbytes for tensor in views.values())
    assert num_weight_bytes(model, dtype=torch.bfloat16) == sum(tensor.data.nbytes for tensor in copies.values())
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    assert tensors_checksum(views) != before
    assert tensors_checksum(copies) == copied


def test_read_only_bytes_are_applied_as_well(checkpoint: Path) -> None:
    source = load(checkpoint)
    frozen = {
        name: HostTensor(dtype=tensor.dtype, shape=tensor.shape, data=memoryview(bytes(tensor.data)))
        for name, tensor in export_weights(source).items()
    }
    target = load(checkpoint)
    apply_weights(target, state(frozen))
    assert state_checksum(target) == state_checksum(source)


def test_an_adapter_starts_the_same_everywhere_and_travels_alone(checkpoint: Path) -> None:
    first, second, other = load(checkpoint, LORA), load(checkpoint, LORA), load(checkpoint, LORA, seed=1)
    assert weight_kind(first) is WeightKind.ADAPTER
    assert state_checksum(first) == state_checksum(second) != state_checksum(other)
    tensors = export_weights(first)
    assert tensors
    assert all("lora_" in name for name in tensors)
    assert {name for name, parameter in first.named_parameters() if parameter.requires_grad} == set(tensors)


def test_a_model_for_generation_asks_for_no_gradients(checkpoint: Path) -> None:
    settings = ModelSettings(path=str(checkpoint))
    for lora in (LoraSettings(), LORA):
        model = load_model(settings, lora, device=CPU, dtype=torch.float32, seed=0, trainable=False)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not model.training


def test_dropout_of_the_model_is_off(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "dropout"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model, ids = load(copy).train(), torch.arange(4, 12)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "model.path is empty"),
        ("/no/such/place", "does not exist"),
        ("./nowhere", "does not exist"),
        ("{file}", "is a file"),
        ("{empty}", "has no weights"),
        ("{unknown}", "cannot be used"),
        ("{partial}", "lacks weights for"),
    ],
)
def test_a_path_that_is_no_model_is_named_with_the_reason(
    checkpoint: Path, tmp_path: Path, path: str, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    unknown = Path(shutil.copytree(checkpoint, tmp_path / "unknown"))
    (unknown / "config.json").write_text('{"model_type": "none-such"}')
    partial = Path(shutil.copytree(checkpoint, tmp_path / "partial"))
    config = json.loads((partial / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=message):
        load(path.format(**{name: tmp_path / name for name in ("file", "empty", "unknown", "partial")}))


def test_a_model_without_tokenizer_says_so(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(ModelSettings(path=str(copy)))


def test_an_adapter_target_that_does_not_exist_is_named_with_those_that_do(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"no_such_proj.*down_proj"):
        load(checkpoint, LoraSettings(rank=2, target_modules=["no_such_proj"]))


def test_the_context_is_the_models_or_a_lower_setting(checkpoint: Path) -> None:
    def context(limit: int) -> int:
        settings = ModelSettings(path=str(checkpoint), max_context=limit)
        return context_length(settings, load_config(settings))

    assert context(0) == 128
    assert context(100) == 100
    with pytest.raises(ConfigError, match=r"model.max_context = 129 .* 128"):
        context(129)


def test_devices_and_types_are_resolved_or_refused() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"trainer\.device"):
        resolve_device("gpu0", setting="trainer.device")
    with pytest.raises(ConfigError, match="GPUs"):
        resolve_device("cuda:99")


def test_layers_with_a_window_are_refused_unless_the_context_fits_in_it(tmp_path: Path) -> None:
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=51,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=16,
            max_position_embeddings=64,
            attn_implementation="sdpa",
        )
    ).eval()
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(ModelSettings(path=str(tmp_path)))
    with pytest.raises(ModelError, match=r"Sliding.*model.max_context"):
        check_architecture(model, tokenizer, context=64)
    check_architecture(model, tokenizer, context=16)
    assert 2 in end_token_ids(model, tokenizer)


class _KnowsNoModel(BaseHTTPRequestHandler):
    """A Hub that has nothing."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def refusal_with_hub_at(address: str, cache: Path) -> str:
    """All that is printed by a process that loads a model from the Hub there."""
    code = """
from pipeline.config import ModelSettings
from pipeline.errors import ModelError
from pipeline.models.loading import load_config
try:
    load_config(ModelSettings(path="no-such/model"))
except ModelError as error:
    print(error)
"""
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environ |= {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    call = [sys.executable, "-c", code]
    ended = subprocess.run(call, capture_output=True, text=True, env=environ, cwd=ROOT, check=True)
    return ended.stdout + ended.stderr


def test_a_model_that_the_hub_does_not_have_is_named_in_one_line(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _KnowsNoModel) as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        (line,) = refusal_with_hub_at(f"http://127.0.0.1:{hub.server_port}", tmp_path).splitlines()
        hub.shutdown()
    assert line.startswith("model.path = 'no-such/model': there is no such directory here, and no model of that name")


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path) -> None:
    (line,) = refusal_with_hub_at("http://127.0.0.1:1", tmp_path).splitlines()
    assert "no copy in the cache, and the Hugging Face Hub cannot be reached (" in line
