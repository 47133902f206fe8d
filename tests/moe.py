"""Tiny mixture-of-experts models, and a plain forward pass through experts that the test chooses.

The forward pass is written out token by token, without transformers' routers or expert kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from tests.tiny import SPECIAL, VOCABULARY, make_tokenizer

KINDS: dict[str, tuple[type, type]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}
NUM_EXPERTS = 6
TOP_K = 2


def tiny_moe(kind: str = "qwen3_moe", *, dtype: torch.dtype = torch.float64, **options: object) -> PreTrainedModel:
    """Three layers; the middle one of a Qwen3-MoE has no router."""
    settings: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "qwen3_moe":
        settings |= {"moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}
    config, model = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: PreTrainedModel = model(config(**(settings | options))).to(dtype).eval()
    if dtype is torch.float64:
        made.set_experts_implementation("eager")  # the fused kernels have no doubles
    return made


def make_tiny_moe(directory: Path, **options: object) -> Path:
    """Save a Qwen3-MoE with its tokenizer; returns the directory."""
    logging.disable_progress_bar()
    tiny_moe(dtype=torch.float32, **options).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def routers(model: nn.Module) -> list[Any]:
    """The routers, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@torch.no_grad()
def own_choice(model: Any, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """What the model's routers choose for each token, [N, layers, top_k]."""
    seen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _m, _a, output: seen.append(output[2])) for router in routers(model)]
    model(input_ids=torch.tensor([list(token_ids)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).numpy()


class _Forced(nn.Module):
    """A mixture whose experts [N, top_k] are given, computed one token and one expert at a time."""

    def __init__(self, block: Any, ids: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.gate, self.experts, self.ids = block.gate, block.experts, ids

    def forward(self, states: Tensor) -> Tensor:
        rows = []
        for state, chosen in zip(states[0], self.ids, strict=True):
            probabilities = (self.gate.weight @ state).softmax(-1)[chosen.tolist()]
            if self.gate.norm_topk_prob:
                probabilities = probabilities / probabilities.sum()
            answers = []
            for expert in chosen.tolist():
                gate, up = (self.experts.gate_up_proj[expert] @ state).chunk(2)
                answers.append(self.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
            rows.append((probabilities[:, None] * torch.stack(answers)).sum(0))
        return torch.stack(rows)[None]


def forced_logprobs(
    model: Any, prompt: Sequence[int], token_ids: Sequence[int], ids: np.ndarray[Any, Any], temperature: float = 1.0
) -> Tensor:
    """log p of each completion token when every token that is read goes to the experts `ids`, [T] with gradient."""
    read = [*prompt, *token_ids][:-1]
    blocks = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    before = [layer.mlp for layer in blocks]
    try:
        for index, layer in enumerate(blocks):
            layer.mlp = _Forced(layer.mlp, ids[:, index])
        logits = model(input_ids=torch.tensor([read]), use_cache=False).logits[0, len(prompt) - 1 :]
    finally:
        for layer, block in zip(blocks, before, strict=True):
            layer.mlp = block
    return (logits / temperature).log_softmax(-1)[torch.arange(len(token_ids)), torch.tensor(list(token_ids))]


def noisy(model: PreTrainedModel, amount: float, seed: int = 1) -> PreTrainedModel:
    """A copy whose routers are off by noise."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for router in routers(other):
            router.weight.add_(amount * torch.randn(router.weight.shape, generator=generator).to(router.weight))
    return other


def tied(model: PreTrainedModel) -> PreTrainedModel:
    """The same model in place, each router undecided between two experts: the slightest noise decides."""
    with torch.no_grad():
        for router in routers(model):
            router.weight[1::2] = router.weight[::2]
    return model
