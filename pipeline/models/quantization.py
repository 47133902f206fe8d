"""Weights below an adapter in 4 bits, through transformers and bitsandbytes.

In: `[lora]`. Out: what transformers is to be told when it loads them. Source: QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from pipeline.config import LoraSettings
from pipeline.errors import ConfigError


def require_quantization(lora: LoraSettings) -> None:
    """Raises ConfigError where a package is missing for it."""
    for package in ("bitsandbytes", "accelerate") if lora.quantization != "none" else ():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"lora.quantization = {lora.quantization!r} needs the package {package}, which is not installed: "
                "pip install 'rollstream[qlora]', or set lora.quantization = 'none'"
            )


def quantized_loading(lora: LoraSettings, *, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments for `from_pretrained`, none where nothing is quantized. dtype: of the products.

    Matrices of the layers have 4 bits in the normal-float code and scales of 8 bits for 64 of them; embeddings,
    norms and the output layer are as they were. Raises ConfigError.
    """
    require_quantization(lora)
    if lora.quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    settings: Any = BitsAndBytesConfig  # carries no annotations
    return {
        "quantization_config": settings(
            load_in_4bit=True,
            bnb_4bit_quant_type=lora.quantization,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
        "device_map": {"": device},
    }


def keep_layout(model: torch.nn.Module) -> None:
    """Have no module lay its weights anew for a processor's own kernel, through which no gradient goes.

    bitsandbytes does that on some CPUs, at the first pass in evaluation mode.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.__dict__["support_avx512bf16_for_cpu"] = False
