"""What the server of a run says of itself: its memory, and whether it takes writes.

In: INFO. Out: one carrier. A server that takes no writes stops all stages at once, and the workers,
whose signs of life are writes, are then taken for lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

if TYPE_CHECKING:
    from redis.asyncio import Redis


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """memory_bytes, memory_max_bytes (0: no bound): None where it does not tell. refusal: why it takes no writes."""

    memory_bytes: int | None = None
    memory_max_bytes: int | None = None
    refusal: str = ""


async def look_at(redis: Redis) -> ServerState:
    """As it is now; empty where it may not be asked."""
    try:
        said = await redis.info("memory", "persistence", "replication")
    except ResponseError:
        return ServerState()
    memory, most = said.get("used_memory"), said.get("maxmemory")
    return ServerState(memory_bytes=memory, memory_max_bytes=most, refusal=_refusal(said, memory or 0, most or 0))


def _refusal(said: Mapping[str, Any], memory: int, most: int) -> str:
    if 0 < most <= memory:
        return f"it is full ({memory / 1e6:,.0f} of {most / 1e6:,.0f} MB): raise maxmemory, or make room"
    if said.get("role") == "slave":
        primary = f"{said.get('master_host')}:{said.get('master_port')}"
        return f"it is a replica of {primary}: name the primary in redis.url (REDIS_URL), or promote this one"
    if said.get("aof_last_write_status") == "err":
        return "it cannot write its append-only file: make room on its disk"
    return ""
