"""Whether settings and servers fit each other, found out before the first prompt.

In: settings, and what a server says of itself. Out: nothing, or a ConfigError that names the flag
with which the server is to be started, or the setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import Config
from pipeline.engines.vllm_options import MIN_BATCHED_TOKENS
from pipeline.engines.vllm_plugin import BACKEND
from pipeline.errors import ConfigError


def check_settings(config: Config) -> None:
    """Raises ConfigError: no URL, one that is none, adapters, or no aiohttp."""
    settings = config.generation.openai
    if find_spec("aiohttp") is None:
        raise ConfigError(
            'generation.engine = "openai", but aiohttp is not installed: pip install "rollstream[openai]"'
        )
    if not settings.urls:
        raise ConfigError("generation.openai.urls is empty: name at least one server, for example http://gpu1:8000")
    for url in settings.urls:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
            raise ConfigError(
                "generation.openai.urls: each must look like http://host:port, without user, password and query; "
                "an API key goes into the variable that generation.openai.api_key_env names"
            )
    if len({base_url(url) for url in settings.urls}) != len(settings.urls):
        raise ConfigError("generation.openai.urls names a server twice")
    if config.lora.rank and not config.merges_lora:
        raise ConfigError(
            f'lora.rank = {config.lora.rank}: with generation.engine = "openai" servers get no adapters; set '
            'generation.merge_lora = true, which merges them into the weights, or generation.engine = "vllm"'
        )


def base_url(url: str) -> str:
    """Without what is often written behind it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def api_key(config: Config) -> str:
    """The key of the servers; empty without one."""
    name = config.generation.openai.api_key_env
    return os.environ.get(name, "") if name else ""


def served_name(models: Mapping[str, Any], wanted: str, *, setting: str = "generation.openai.model") -> str:
    """The name to ask for. models: of the route /v1/models. setting: that names it. Raises ConfigError."""
    names = [str(model["id"]) for model in models["data"] if not model.get("parent")]
    if wanted:
        if wanted not in names:
            raise ConfigError(f"it does not serve {setting} = {wanted!r}; it serves {names}")
        return wanted
    if len(names) != 1:
        raise ConfigError(f"it serves {names}; say which with {setting}")
    return names[0]


def check_server(vllm_config: Mapping[str, Any], config: Config, *, context: int) -> None:
    """vllm_config: of the route /server_info. context: prompt plus completion. Raises ConfigError."""
    complaints = list(_complaints(vllm_config, config, context))
    if complaints:
        raise ConfigError("; ".join(complaints))


def can_fetch(vllm_config: Mapping[str, Any]) -> bool:
    """Whether its workers can say how far they are with fetching weights themselves."""
    from pipeline.engines.vllm_worker import PATH

    return bool(vllm_config["parallel_config"].get("worker_extension_cls") == PATH)


def _complaints(vllm: Mapping[str, Any], config: Config, context: int) -> Iterator[str]:
    model, scheduler = vllm["model_config"], vllm["scheduler_config"]
    generation = config.generation
    if model.get("logprobs_mode") != "processed_logprobs":
        yield (
            "its logprobs are not those of the distribution that is sampled; "
            "start it with --logprobs-mode processed_logprobs"
        )
    if (vllm.get("weight_transfer_config") or {}).get("backend") != BACKEND:
        yield f"it takes no weights from rollstream; start it with {_backend_flag()}, in an environment with rollstream"
    if int(model.get("max_model_len") or 0) < context:
        yield (
            f"its context is {model.get('max_model_len')} tokens, the run's {context}; "
            f"start it with --max-model-len {context}, or lower model.max_context"
        )
    if generation.needs_sampling_mask and not model.get("return_sampling_mask"):
        yield (
            "it does not say which tokens top_p and top_k left; start it with --return-sampling-mask, "
            "or set generation.replay_sampling_mask = false"
        )
    is_cpu = vllm.get("device_config", {}).get("device") == "cpu"
    if is_cpu and scheduler.get("enable_chunked_prefill"):
        yield (
            "on a CPU it ends when a seeded prompt is read in two parts; "
            f"start it with --no-enable-chunked-prefill --max-num-batched-tokens {max(context, MIN_BATCHED_TOKENS)}"
        )


def _backend_flag() -> str:
    return f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
