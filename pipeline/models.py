"""The policy as a Hugging Face model: loading, exporting its weights, replacing them in place.

In: `[model]` and `[lora]`. Out: a model, its tokenizer, and its weights as host tensors. Nothing
is ever replaced before every name, shape and type of the new weights has been checked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import xxhash

from pipeline.config import LoraSettings, ModelSettings
from pipeline.errors import ConfigError, ModelError, WeightError
from pipeline.weights import HostTensor, WeightKind, WeightState

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Staged: TypeAlias = list[tuple[torch.nn.Parameter, torch.Tensor]]

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_ADAPTER_MARK = ".lora_"


def resolve_device(name: str, *, setting: str = "generation.device") -> torch.device:
    """The device behind a setting; "auto" takes a GPU when there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'{setting} = {name!r} is no device; use "auto", "cpu" or "cuda:0"') from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f'{setting} = {name!r}, but torch sees {torch.cuda.device_count()} GPUs; use "auto"')
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision behind a setting; "auto" is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _dtype(name)


def load_model(
    model: ModelSettings,
    lora: LoraSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    trainable: bool,
) -> torch.nn.Module:
    """The policy, with its adapter when `lora.rank` is not 0.

    Dropout of the model itself is off, because probabilities must be a function of the weights. An
    adapter is initialised on the CPU from `seed`, so that every worker starts from the same one.
    Raises ModelError.
    """
    _check_files(model, _WEIGHT_FILES, "weights (*.safetensors)")
    with quiet():
        loaded = _load_pretrained(model, dtype)
    loaded.requires_grad_(trainable and lora.rank == 0)
    if lora.rank:
        loaded = _with_adapter(loaded, lora, seed)
    _set_adapter_trainable(loaded, trainable=trainable)
    loaded.to(device)
    return loaded.train(trainable)


def check_model_files(model: ModelSettings) -> None:
    """Whether a directory holds all that a model needs, without reading it. Raises ModelError."""
    _check_files(model, ("config.json",), "configuration (config.json)")
    _check_files(model, _WEIGHT_FILES, "weights (*.safetensors)")
    _check_files(model, _TOKENIZER_FILES, "tokenizer (tokenizer.json)")


def load_config(model: ModelSettings) -> PreTrainedConfig:
    """The model's Hugging Face configuration. Raises ModelError."""
    from transformers import AutoConfig

    _check_files(model, ("config.json",), "configuration (config.json)")
    try:
        with quiet():
            return cast(
                "PreTrainedConfig",
                AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code),
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path = {model.path!r}: its config.json cannot be used: {_short(error)}") from error


def load_tokenizer(model: ModelSettings) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ModelError."""
    from transformers import AutoTokenizer

    _check_files(model, _TOKENIZER_FILES, "tokenizer (tokenizer.json)")
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"model.path = {model.path!r}: its tokenizer cannot be loaded: {_short(error)}") from error


def context_length(model: ModelSettings, config: PreTrainedConfig) -> int:
    """Prompt plus completion, in tokens. Raises ConfigError where the setting exceeds the model."""
    text_config = config.get_text_config(decoder=True)
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    if own is None and not model.max_context:
        raise ConfigError("model.max_context = 0, but the model states no limit of its own; set model.max_context")
    if own is not None and model.max_context > own:
        raise ConfigError(f"model.max_context = {model.max_context} exceeds the model's own limit of {own}; lower it")
    return model.max_context or own or 0


def weight_kind(model: torch.nn.Module) -> WeightKind:
    """What travels for this model: the adapter where it has one, else everything."""
    return WeightKind.ADAPTER if hasattr(model, "peft_config") else WeightKind.SNAPSHOT


def export_weights(
    model: torch.nn.Module, *, kind: WeightKind | None = None, dtype: torch.dtype | None = None
) -> dict[str, HostTensor]:
    """One copy of the weights in host memory; tied tensors once, under their first name.

    kind: defaults to `weight_kind(model)`. dtype: convert to it; None keeps each tensor's own.
    """
    return {
        name: _to_host(parameter, dtype) for name, parameter in _travelling(model, kind or weight_kind(model)).items()
    }


def stage_weights(model: torch.nn.Module, state: WeightState) -> Staged:
    """Pair every tensor of `state` with the parameter it replaces, and check all of them.

    Changes nothing. Raises WeightError: another kind, missing or unknown names, another shape,
    fewer bytes than the shape needs, or a type that is no floating-point type.
    """
    if state.kind is not weight_kind(model):
        raise WeightError(f"weights are of kind {state.kind.value}, the model takes {weight_kind(model).value}")
    targets = _travelling(model, state.kind)
    missing, unknown = targets.keys() - state.tensors.keys(), state.tensors.keys() - targets.keys()
    if missing or unknown:
        raise WeightError(f"weights do not fit the model: missing {_few(missing)}, unknown {_few(unknown)}")
    return [(target, _from_host(name, state.tensors[name], target)) for name, target in targets.items()]


def apply_staged(staged: Staged) -> None:
    """Copy staged tensors into their parameters, in place; rounds to the parameter's precision."""
    with torch.no_grad():
        for target, source in staged:
            target.copy_(source)


def apply_weights(model: torch.nn.Module, state: WeightState) -> None:
    """Replace the model's weights in place. Raises WeightError before anything is changed."""
    apply_staged(stage_weights(model, state))


def state_checksum(model: torch.nn.Module) -> str:
    """xxh3-128 over names, types, shapes and bytes of all that `export_weights` gives."""
    return tensors_checksum(export_weights(model))


def tensors_checksum(tensors: Mapping[str, HostTensor]) -> str:
    """xxh3-128 over names, types, shapes and bytes, in the order of the names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def _load_pretrained(model: ModelSettings, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    config = load_config(model)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)
    try:
        answer: Any = AutoModelForCausalLM.from_pretrained(
            model.path,
            config=config,
            dtype=dtype,
            attn_implementation=model.attention,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"model.path = {model.path!r} cannot be loaded: {_short(error)}") from error
    loaded, info = answer
    if info["missing_keys"]:
        raise ModelError(
            f"model.path = {model.path!r} lacks weights for {_few(info['missing_keys'])}; it is no complete checkpoint"
        )
    return cast(torch.nn.Module, loaded)


def _with_adapter(model: torch.nn.Module, lora: LoraSettings, seed: int) -> torch.nn.Module:
    import peft

    everything = lora.target_modules == ["all-linear"]
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),  # any number, whatever the annotation says
        lora_dropout=lora.dropout,
        target_modules="all-linear" if everything else list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ModelError(
                f"lora.target_modules = {lora.target_modules} names no module of this model; "
                f'use ["all-linear"] or names such as {_few(_linear_names(model))}'
            ) from error
    return cast(torch.nn.Module, wrapped)


def _set_adapter_trainable(model: torch.nn.Module, *, trainable: bool) -> None:
    for name, parameter in model.named_parameters():
        if _ADAPTER_MARK in name:
            parameter.requires_grad_(trainable)


def _linear_names(model: torch.nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def _travelling(model: torch.nn.Module, kind: WeightKind) -> dict[str, torch.nn.Parameter]:
    """Parameters that are sent; `named_parameters` gives a tied one under its first name only."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if kind is WeightKind.SNAPSHOT or _ADAPTER_MARK in name
    }


def _to_host(parameter: torch.Tensor, dtype: torch.dtype | None) -> HostTensor:
    host = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device="cpu")
    host.copy_(parameter.detach())
    return HostTensor(
        dtype=str(host.dtype).removeprefix("torch."),
        shape=tuple(host.shape),
        data=host.reshape(-1).view(torch.uint8).numpy().data,
    )


def _from_host(name: str, tensor: HostTensor, target: torch.nn.Parameter) -> torch.Tensor:
    if tensor.shape != tuple(target.shape):
        raise WeightError(f"{name} has shape {tensor.shape}, the model's has {tuple(target.shape)}")
    try:
        dtype = _dtype(tensor.dtype)
    except ConfigError as error:
        raise WeightError(f"{name} has the type {tensor.dtype!r}") from error
    if dtype.is_floating_point != target.dtype.is_floating_point:
        raise WeightError(f"{name} has the type {tensor.dtype}, the model's has {target.dtype}")
    if tensor.data.nbytes != target.numel() * dtype.itemsize:
        raise WeightError(f"{name} has {tensor.data.nbytes} bytes, its shape needs {target.numel() * dtype.itemsize}")
    if not tensor.data.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    # torch refuses to share read-only memory without a warning, so such tensors are copied once.
    buffer = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is no tensor type of torch")
    return dtype


def _check_files(model: ModelSettings, patterns: tuple[str, ...], what: str) -> None:
    """A directory is looked into here; anything else that has a Hub id's form is left to the Hub."""
    if not model.path:
        raise ModelError("model.path is empty; set it to the directory of a Hugging Face causal language model")
    directory = Path(model.path).expanduser()
    if directory.is_dir():
        if not any(match for pattern in patterns for match in directory.glob(pattern)):
            raise ModelError(f"model.path = {model.path!r} has no {what}; point it to a complete checkpoint")
        return
    if directory.exists():
        raise ModelError(f"model.path = {model.path!r} is a file; point it to the directory of a checkpoint")
    if directory.is_absolute() or model.path.startswith((".", "~")) or model.path.count("/") > 1:
        raise ModelError(f"model.path = {model.path!r} does not exist; point it to the directory of a checkpoint")


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no advice on the console while transformers loads."""
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging  # its switches for bars carry no annotations
    level = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    bars.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if has_bars:
            bars.enable_progress_bar()


def _few(names: set[str] | frozenset[str] | list[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if shown else "none"


def _short(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
