"""How one vLLM server gets other weights: the requests, in their order.

In: a connection, and what its workers are to load. Out: a server that has them, and labels tokens with their
version. Where one of the requests fails nobody knows which weights it has, and it stays paused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pipeline.engines.openai_answers import PassingError
from pipeline.engines.openai_http import Connection
from pipeline.engines.vllm_worker import STATUS


async def replace(
    http: Connection, weight_version: int, update_info: Mapping[str, Any], kv_on_update: Literal["keep", "recompute"]
) -> None:
    """Between two tokens. Raises PassingError."""
    clear = str(kv_on_update == "recompute").lower()
    await http.post(f"/pause?mode=keep&clear_cache={clear}")
    await _begin(http)
    await http.post("/update_weights", {"update_info": update_info})
    await http.post("/finish_weight_update", {"weight_version": str(weight_version)})
    await http.post("/resume")


async def _begin(http: Connection) -> None:
    """An update that was broken off counts as under way until it is finished."""
    try:
        await http.post("/start_weight_update")
    except PassingError:
        await http.post("/finish_weight_update")
        await http.post("/start_weight_update")


async def fetched(http: Connection) -> list[int | None]:
    """The version that each worker has fetched. Raises PassingError."""
    results = (await http.post("/collective_rpc", {"method": STATUS}))["results"]
    if problems := [result["problem"] for result in results if result["problem"]]:
        raise PassingError(f"its workers cannot fetch weights: {problems[0]}")
    if not results:
        raise PassingError("it has no workers")
    return [result["weight_version"] for result in results]
