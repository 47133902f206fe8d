"""vLLM's engine brought up, or said why it cannot be.

In: arguments for it, from `pipeline.engines.vllm_options`. Out: an engine that has drawn a token, or
a ConfigError, ModelError or EngineLostError with the way out. What vLLM raises is read here and nowhere else.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from pipeline.engines.vllm_options import installed_version
from pipeline.engines.vllm_outputs import TokenCounter
from pipeline.errors import ConfigError, EngineLostError, ModelError
from pipeline.logs import get_logger

_NO_MASKS = "sampling distribution replay requires"
_NO_EXPERTS = re.compile(r"\s*(?:Value error, )?(.*(?:Model Runner V2|AuxOutput|outed-experts)[^\n\[]*)")
_END_S = 1.0
_FIRST_VERSION = "0.32"  # its outputs say which weights drew each token

log = get_logger()


def start_engine(arguments: dict[str, Any], counter: TokenCounter) -> tuple[Any, bool]:
    """The engine, and whether sampling masks are to be read off the logprobs.

    Raises ConfigError, and EngineLostError where its processes end at the start.
    """
    try:
        return _start(arguments, counter), False
    except ConfigError as error:
        if not arguments["return_sampling_mask"] or _NO_MASKS not in str(error):
            raise
    # This runner keeps no sampling masks, so they are read off the logprobs of all tokens.
    log.warning("masks_from_logprobs", reason=_NO_MASKS, cost="logprobs of the whole vocabulary at each token")
    return _start(arguments | {"return_sampling_mask": False, "max_logprobs": -1}, counter), True


async def draw_one_token(llm: Any, token_id: int, *, model_path: str) -> None:
    """What vLLM cannot do with this model on this machine shows only when it is run. Raises ModelError."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async for _ in llm.generate(tokens_input([token_id]), SamplingParams(max_tokens=1), "probe"):
            pass
    except EngineDeadError as error:
        raise ModelError(
            f"vLLM {installed_version()} cannot run model.path = {model_path!r} on this machine; "
            'what it printed above says why. generation.engine = "transformers" runs more models'
        ) from error


def close_connections(core: Any) -> None:
    """Close what vLLM's front end leaves open when it is shut down: a ZeroMQ context, with its two threads.

    core: its client of the other processes, None where there was none. Called in the client's event loop.
    """
    resources = getattr(core, "resources", None)
    if resources is None or getattr(resources, "coordinator", None) is not None:
        return  # with data parallelism there are sockets that only vLLM knows of
    for name in ("output_socket", "input_socket", "first_req_send_socket", "first_req_rcv_socket"):
        if (socket := getattr(resources, name, None)) is not None:
            socket.close(linger=0)
    # One socket that is not known here would keep it waiting.
    ending = threading.Thread(target=resources.ctx.term, name="vllm-connections", daemon=True)
    ending.start()
    ending.join(_END_S)


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
        if arguments["enable_return_routed_experts"] and (reason := _NO_EXPERTS.search(str(error))):
            raise ConfigError(
                f"generation.replay_routing = true, but vLLM {installed_version()} cannot return experts here: "
                f'{reason[1].rstrip(". ")}; set generation.engine = "transformers", or '
                "generation.replay_routing = false"
            ) from error
        raise ConfigError(f"vLLM {installed_version()} refuses its arguments (generation.vllm): {error}") from error
    except (
        RuntimeError
    ) as error:  # of its processes: an argument that only they refuse, or memory that may be free later
        raise EngineLostError(
            f"vLLM {installed_version()} did not start: {error}. What it printed above says why; model.path, "
            "generation.vllm and the memory that is free decide"
        ) from error
