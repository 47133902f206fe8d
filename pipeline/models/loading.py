"""The policy as a Hugging Face model: its files, its tokenizer, its adapter.

In: `[model]` and `[lora]`. Out: a model and a tokenizer, or a `ModelError` that names the setting
and the way out. Nothing is printed while transformers loads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.config import LoraSettings, ModelSettings
from pipeline.errors import ConfigError, ModelError, few
from pipeline.models.files import require_configuration, require_tokenizer, require_weights
from pipeline.models.hub import require_on_hub
from pipeline.models.quantization import keep_layout, quantized_loading
from pipeline.models.weights import ADAPTER_MARK, dtype_named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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
    return dtype_named(name)


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
    Raises ModelError, ConfigError.
    """
    require_weights(model)
    _require_somewhere(model)
    quantized = quantized_loading(lora, dtype=dtype, device=device)
    with quiet():
        loaded = _load_pretrained(model, dtype, quantized)
    keep_layout(loaded)
    loaded = _prepared(loaded, lora, seed=seed, trainable=trainable)
    loaded.to(device)
    return loaded.train(trainable)


def load_untrained(model: ModelSettings, lora: LoraSettings, *, dtype: torch.dtype) -> torch.nn.Module:
    """What `load_model` gives for training, without the weights, which another process has. Raises ModelError."""
    plain = LoraSettings(rank=0)
    skeleton = load_skeleton(model, plain, attention=model.attention).to(dtype)
    with torch.device("meta"):
        return _prepared(skeleton, lora, seed=0, trainable=True).train()


def _prepared(model: torch.nn.Module, lora: LoraSettings, *, seed: int, trainable: bool) -> torch.nn.Module:
    """With its adapter, if it is to have one; what is not trained has no gradient."""
    model.requires_grad_(trainable and lora.rank == 0)
    if lora.rank:
        model = _with_adapter(model, lora, seed)
    _set_adapter_trainable(model, trainable=trainable)
    return model


def load_skeleton(model: ModelSettings, lora: LoraSettings, *, attention: str = "") -> torch.nn.Module:
    """The policy without its weights: names, shapes and types of all tensors.

    attention: an implementation that must be there; empty takes any. Raises ModelError.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = load_config(model)
    with quiet(), torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config  # carries no annotations
        try:
            wanted = {"attn_implementation": attention} if attention else {}
            skeleton = make(config, trust_remote_code=model.trust_remote_code, **wanted)
        except (OSError, ValueError, ImportError) as error:
            how = f" with model.attention = {attention!r}" if attention else ""
            raise ModelError(f"model.path = {model.path!r} cannot be loaded{how}: {_short(error)}") from error
        with contextlib.suppress(OSError):
            skeleton.generation_config = GenerationConfig.from_pretrained(model.path)
        return _with_adapter(skeleton, lora, seed=0) if lora.rank else skeleton


def load_config(model: ModelSettings) -> PreTrainedConfig:
    """The model's Hugging Face configuration. Raises ModelError."""
    from transformers import AutoConfig

    require_configuration(model)
    _require_somewhere(model)
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

    require_tokenizer(model)
    _require_somewhere(model)
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


def _load_pretrained(model: ModelSettings, dtype: torch.dtype, quantized: dict[str, Any]) -> torch.nn.Module:
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
            **quantized,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"model.path = {model.path!r} cannot be loaded: {_short(error)}") from error
    loaded, info = answer
    if info["missing_keys"]:
        raise ModelError(
            f"model.path = {model.path!r} lacks weights for {few(info['missing_keys'])}; it is no complete checkpoint"
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
                f'use ["all-linear"] or names such as {few(_linear_names(model))}'
            ) from error
    return cast(torch.nn.Module, wrapped)


def _set_adapter_trainable(model: torch.nn.Module, *, trainable: bool) -> None:
    for name, parameter in model.named_parameters():
        if ADAPTER_MARK in name:
            parameter.requires_grad_(trainable)


def _linear_names(model: torch.nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def _require_somewhere(model: ModelSettings) -> None:
    """What is no directory must be on the Hub, which is asked before libraries that ask again and again."""
    if not Path(model.path).expanduser().is_dir():
        require_on_hub(model.path)


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


def _short(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
