"""Whose turn it is on a device that workers share."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from pipeline.fleet import Fleet
from pipeline.keys import Keys

TTL_S = 30.0


@pytest.fixture
def fleet(redis: Redis, keys: Keys) -> Fleet:
    return Fleet(redis, keys)


async def test_one_has_it_and_hears_who_waits(fleet: Fleet) -> None:
    assert await fleet.device_turn("generator-a", TTL_S, "take", "idle") == "held"
    assert await fleet.device_turn("generator-b", TTL_S, "take", "idle") == ""
    assert await fleet.device_turn("generator-a", TTL_S, "keep", "idle") == "idle"
    assert await fleet.device_turn("trainer", TTL_S, "take", "urgent") == ""
    assert await fleet.device_turn("generator-b", TTL_S, "take", "idle") == ""
    assert await fleet.device_turn("generator-a", TTL_S, "keep", "idle") == "urgent", "the trainer goes first"
    assert await fleet.device_turn("generator-a", TTL_S, "give", "idle") == ""
    assert await fleet.device_turn("generator-b", TTL_S, "take", "idle") == "", "the trainer goes first"
    assert await fleet.device_turn("trainer", TTL_S, "take", "urgent") == "held"
    assert await fleet.device_turn("trainer", TTL_S, "keep", "urgent") == "held", "it is no longer waiting itself"


async def test_taking_it_twice_is_taking_it_once(fleet: Fleet) -> None:
    for _ in range(2):
        assert await fleet.device_turn("trainer", TTL_S, "take", "urgent") == "held"
    for _ in range(2):
        assert await fleet.device_turn("trainer", TTL_S, "give", "urgent") == ""
    assert await fleet.device_turn("generator-a", TTL_S, "take", "idle") == "held"


async def test_who_is_silent_loses_it_and_cannot_give_it_for_another(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    assert await fleet.device_turn("generator-a", TTL_S, "take", "idle") == "held"
    assert 0 < await redis.pttl(keys.device_turn) <= TTL_S * 1000
    await redis.delete(keys.device_turn)  # as when it expires
    assert await fleet.device_turn("generator-a", TTL_S, "keep", "idle") == "held", "nobody took it meanwhile"
    await redis.delete(keys.device_turn)
    assert await fleet.device_turn("trainer", TTL_S, "take", "urgent") == "held"
    assert await fleet.device_turn("generator-a", TTL_S, "keep", "idle") == "", "another has it"
    await fleet.device_turn("generator-a", TTL_S, "give", "idle")
    assert await fleet.device_turn("trainer", TTL_S, "keep", "urgent") == "held"
