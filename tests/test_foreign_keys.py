"""A key of the run's prefix that holds something else: every worker and command names it and the way out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from pipeline.config import QueueSettings
from pipeline.errors import RunConflictError
from pipeline.fleet import Fleet, WorkerInfo
from pipeline.keys import Keys, Stream
from pipeline.scaling import Scaling
from pipeline.settings.files import load_config
from pipeline.streams import Streams
from pipeline.worker.lifecycle import WorkerContext, run_worker
from tests.conftest import Answer
from tests.sample_worker import idle

Ask = Callable[..., Answer]
ALL_KEYS = [key.partition(":")[2] for key in Keys("x").types]


async def spoil(redis: Redis, key: str) -> None:
    """Put a list there, which no run keeps."""
    await redis.delete(key)
    await redis.execute_command("RPUSH", key, "of another program")


async def use_all(redis: Redis, keys: Keys) -> None:
    """What workers do with each of their keys."""
    streams, fleet = Streams(redis, keys, QueueSettings(), consumer="worker"), Fleet(redis, keys)
    await streams.open()
    await fleet.join({"lora.rank": "0"})
    await fleet.acquire_trainer("worker", 30.0)
    await fleet.device_turn("worker", 30.0, "take", "idle")
    await fleet.register(WorkerInfo(worker_id="worker", role="scorer", host="here", pid=1))
    await Scaling(redis, keys).keep("up", {"scorer": (1, 1)}, ttl_s=30.0)
    await streams.ledger()
    await streams.uncommitted()
    await streams.partial("00000000")
    await streams.feed([], limit=1)
    await streams.dead_letters()
    for stream in Stream:
        await streams.claim(stream, 1, block_s=0)
    await streams.release_all()


@pytest.mark.parametrize("name", ALL_KEYS)
async def test_a_key_of_another_type_is_named_with_the_way_out(redis: Redis, keys: Keys, name: str) -> None:
    key = f"{{{keys.run}}}:{name}"
    await use_all(redis, keys)
    await spoil(redis, key)
    with pytest.raises(RunConflictError) as caught:
        await use_all(redis, keys)
    said = str(caught.value)
    assert f"the key {key} on the server holds a list, where a run keeps a {keys.types[key]}" in said
    assert f"`rollstream reset --run {keys.run}`" in said
    assert await redis.type(key) == b"list", "it is not ours to remove unasked"


@pytest.mark.parametrize("name", ["prompts", "meta", "workers", "control"])
async def test_commands_say_which_key_and_reset_removes_it(ask: Ask, redis: Redis, keys: Keys, name: str) -> None:
    key = f"{{{keys.run}}}:{name}"
    await use_all(redis, keys)
    await spoil(redis, key)
    answer = await asyncio.to_thread(ask, "status")
    assert (answer.code, answer.out) == (2, "")
    assert f"the key {key} on the server holds a list" in answer.err
    if name != "workers":
        await Fleet(redis, keys).deregister("worker") if name != "control" else await redis.delete(keys.workers)
    assert (await asyncio.to_thread(ask, "reset", "--yes")).code == 0
    assert (await asyncio.to_thread(ask, "status")).code == 0


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("ledger", "fed", "many"),
        ("ledger", b"\xff", "1"),
        ("ledger", "next_ordinal", "1e9"),
        ("meta", "weight_version", ""),
    ],
)
async def test_a_value_that_no_run_writes_is_refused_with_the_name_of_its_key(
    ask: Ask, redis: Redis, keys: Keys, name: str, field: str | bytes, value: str
) -> None:
    key = f"{{{keys.run}}}:{name}"
    await use_all(redis, keys)
    await redis.execute_command("HSET", key, field, value)
    answer = await asyncio.to_thread(ask, "status")
    assert (answer.code, answer.out) == (2, "")
    assert f"the key {key} on the server holds what no run writes there" in answer.err
    assert f"`rollstream reset --run {keys.run}`" in answer.err
    await redis.delete(keys.workers)
    assert (await asyncio.to_thread(ask, "reset", "--yes")).code == 0
    assert (await asyncio.to_thread(ask, "status")).code == 0


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("name", ["prompts", "meta", "workers"])
@pytest.mark.parametrize("is_late", [False, True], ids=["at arrival", "in mid-run"])
def test_a_worker_ends_with_code_2_and_the_name_of_the_key(
    valkey_url: str, run_name: str, name: str, is_late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"{{{run_name}}}:{name}"
    config = load_config(
        [],
        environ={},
        overrides=[f"run.name={run_name}", f"redis.url='{valkey_url}'", "worker.heartbeat_s=0.2"],
    )

    async def finds_it_spoilt(context: WorkerContext) -> None:
        await spoil(context.redis, key)
        if name == "prompts":
            await context.streams.claim(Stream.PROMPTS, 1, block_s=0)
        await idle(context)

    async def ends(context: WorkerContext) -> None:
        await spoil(context.redis, key)

    if not is_late:
        run_worker("scorer", config, ends)
    assert run_worker("scorer", config, finds_it_spoilt) == 2
    assert f"error: run.name = '{run_name}': the key {key} on the server holds a list" in capsys.readouterr().err
