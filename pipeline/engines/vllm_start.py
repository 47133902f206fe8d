"""vLLM's processes, started.

In: arguments for them. Out: its AsyncLLM, or ConfigError that says which of them, or which vLLM, it is
that cannot be used.
"""

from __future__ import annotations

from typing import Any

from pipeline.engines.vllm_options import installed_version
from pipeline.engines.vllm_outputs import TokenCounter
from pipeline.errors import ConfigError
from pipeline.logs import get_logger

_NO_MASKS = "sampling distribution replay requires"
_FIRST_VERSION = "0.32"  # its outputs say which weights drew each token

log = get_logger()


def start_llm(arguments: dict[str, Any], counter: TokenCounter) -> tuple[Any, bool]:
    """The AsyncLLM, and whether sampling masks are to be read off its logprobs. Raises ConfigError."""
    try:
        return _start(arguments, counter), False
    except ConfigError as error:
        if not arguments["return_sampling_mask"] or _NO_MASKS not in str(error):
            raise
        # This runner keeps no sampling masks, so they are read off the logprobs of all tokens.
        log.warning("masks_from_logprobs", reason=_NO_MASKS, cost="logprobs of the whole vocabulary at each token")
        return _start(arguments | {"return_sampling_mask": False, "max_logprobs": -1}, counter), True


def _start(arguments: dict[str, Any], counter: TokenCounter) -> Any:
    try:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.outputs import CompletionOutput
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(f"vLLM {installed_version()} cannot be used: {error}") from error
    if "weight_versions" not in CompletionOutput.__dataclass_fields__:
        raise ConfigError(
            f"vLLM {installed_version()} does not say which weights drew a token; install {_FIRST_VERSION} or newer"
        )
    transfer = WeightTransferConfig(**arguments["weight_transfer_config"])
    try:
        engine_args = AsyncEngineArgs(**(arguments | {"weight_transfer_config": transfer}))
        return AsyncLLM.from_engine_args(engine_args, stat_loggers=[counter.logger])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM {installed_version()} refuses its arguments (generation.vllm): {error}") from error
