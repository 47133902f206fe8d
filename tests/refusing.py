"""Servers that refuse writes for a while, each in its own way."""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline.embedded import EmbeddedServer

BREAK_AND_MEND = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "disk full": (("CONFIG", "SET", "save", "3600 1"), ("CONFIG", "SET", "save", "")),
}


def server_without_a_place_for_snapshots(folder: Path) -> EmbeddedServer:
    """A server whose snapshots fail: a folder stands where their file should be, as root could write anywhere."""
    server = EmbeddedServer.start(folder)
    (folder / "dump.rdb").mkdir()
    return server


async def break_(redis: Redis, how: str) -> None:
    """Returns when the server refuses a write, so that the call under test will be refused too."""
    await redis.execute_command(*BREAK_AND_MEND[how][0])
    if how == "disk full":
        await redis.bgsave()
    await _until_refused(redis)


async def mend(redis: Redis, how: str) -> None:
    await redis.execute_command(*BREAK_AND_MEND[how][1])


async def _until_refused(redis: Redis) -> None:
    while True:
        try:
            await redis.set("probe", "x")
        except ResponseError:
            return
