"""The registry of workers, requests to them, and what a run's workers agree on."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from redis.asyncio import Redis

from pipeline.errors import RunConflictError, TrainerReplacedError
from pipeline.fleet import Fleet, WorkerInfo, new_worker_id
from pipeline.keys import Keys
from pipeline.messages import Endpoints


@pytest.fixture
def fleet(redis: Redis, keys: Keys) -> Fleet:
    return Fleet(redis, keys)


def worker(worker_id: str = "scorer-a", *, role: str = "scorer", heartbeat_s: float = 2.0) -> WorkerInfo:
    return WorkerInfo(worker_id=worker_id, role=role, host="h", pid=7, address="h:1", heartbeat_s=heartbeat_s)


async def make_silent(redis: Redis, keys: Keys, worker_id: str, seconds: float) -> None:
    """As if the worker's last beat had come `seconds` earlier."""
    beat, rest = (await redis.hget(keys.workers, worker_id)).split(b" ", 1)
    await redis.hset(keys.workers, worker_id, str(int(beat) - int(seconds * 1e6)).encode() + b" " + rest)


def test_worker_ids_are_readable_and_differ() -> None:
    ids = {new_worker_id("generator") for _ in range(50)}
    assert len(ids) == 50
    assert all(worker_id.startswith("generator-") for worker_id in ids)


async def test_registered_worker_is_listed_with_what_it_says(fleet: Fleet) -> None:
    await fleet.register(worker())
    await fleet.beat(dataclasses.replace(worker(), status={"state": "running", "weight_version": 3}))
    (seen,) = await fleet.workers()
    assert (seen.worker_id, seen.role, seen.pid, seen.address) == ("scorer-a", "scorer", 7, "h:1")
    assert seen.status == {"state": "running", "weight_version": 3}
    assert seen.is_alive
    assert 0 <= seen.age_s < 5


async def test_start_of_a_worker_is_kept_over_its_beats(fleet: Fleet) -> None:
    await fleet.register(worker())
    (first,) = await fleet.workers()
    await fleet.beat(worker())
    (second,) = await fleet.workers()
    assert second.started_at == first.started_at > 0


async def test_silent_worker_is_lost_and_later_forgotten(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    await fleet.register(worker())
    await make_silent(redis, keys, "scorer-a", 10)
    (lost,) = await fleet.workers()
    assert not lost.is_alive
    await make_silent(redis, keys, "scorer-a", 180)
    assert await fleet.workers() == []
    assert not await redis.hexists(keys.workers, "scorer-a")


async def test_worker_that_comes_back_in_time_is_not_forgotten(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    await fleet.register(worker())
    await make_silent(redis, keys, "scorer-a", 10)
    await fleet.beat(worker())
    assert [seen.is_alive for seen in await fleet.workers()] == [True]


async def test_why_a_worker_failed_is_known_until_another_of_its_role_starts(fleet: Fleet) -> None:
    for role in ("trainer", "exporter"):
        await fleet.register(worker(f"{role}-a", role=role))
        await fleet.deregister(f"{role}-a", role=role, why_failed="the disk is full")
    await fleet.register(worker("scorer-a", role="scorer"))
    assert (await fleet.facts()).failures == {"trainer": "the disk is full"}
    await fleet.register(worker("trainer-b", role="trainer"))
    assert (await fleet.facts()).failures == {}


async def test_deregistered_worker_vanishes_with_requests_to_it(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    await fleet.register(worker())
    await fleet.drain("scorer-a")
    await fleet.deregister("scorer-a")
    assert await fleet.workers() == []
    assert await redis.hgetall(keys.control) == {}


async def test_pause_reaches_everyone_until_resume(fleet: Fleet) -> None:
    await fleet.pause()
    assert (await fleet.register(worker())).paused
    assert (await fleet.facts()).is_paused
    await fleet.resume()
    assert not (await fleet.beat(worker())).paused


async def test_drain_by_role_reaches_all_that_are_there_and_nobody_later(fleet: Fleet) -> None:
    for name in ("a", "b"):
        await fleet.register(worker(name))
    await fleet.register(worker("t", role="trainer"))
    assert await fleet.drain("scorer") == ["a", "b"]
    assert [(await fleet.beat(worker(name))).drain for name in ("a", "b")] == [True, True]
    assert not (await fleet.beat(worker("t", role="trainer"))).drain
    assert not (await fleet.register(worker("late"))).drain


async def test_a_lost_worker_is_not_asked_to_leave(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    await fleet.register(worker("there"))
    await fleet.register(worker("gone"))
    await make_silent(redis, keys, "gone", 60)
    assert await fleet.drain("scorer") == ["there"]
    assert await fleet.drain("gone") == []
    assert not await redis.hexists(keys.control, "drain:gone")


async def test_drain_of_nobody_says_so(fleet: Fleet) -> None:
    assert await fleet.drain("generator") == []


async def test_stop_ends_present_workers_and_no_later_ones(fleet: Fleet) -> None:
    await fleet.register(worker("old"))
    await fleet.stop("all steps are done")
    assert (await fleet.beat(worker("old"))).stop_reason == "all steps are done"
    assert (await fleet.register(worker("new"))).stop_reason is None
    assert (await fleet.facts()).stop_reason == "all steps are done"


async def test_trainer_that_takes_over_clears_an_old_stop(fleet: Fleet) -> None:
    await fleet.register(worker("old"))
    await fleet.stop("all steps are done")
    assert await fleet.acquire_trainer("trainer-b", 10)
    assert (await fleet.beat(worker("old"))).stop_reason is None
    assert (await fleet.facts()).stop_reason is None


async def test_renewing_the_lock_keeps_a_stop_that_this_trainer_asked_for(fleet: Fleet) -> None:
    await fleet.acquire_trainer("trainer-a", 10)
    await fleet.register(worker("old"))
    await fleet.stop("done")
    assert await fleet.renew_trainer("trainer-a", 10)
    assert await fleet.acquire_trainer("trainer-a", 10)
    assert (await fleet.beat(worker("old"))).stop_reason == "done"


async def test_only_one_trainer_holds_the_lock(fleet: Fleet) -> None:
    assert await fleet.acquire_trainer("a", 10)
    assert not await fleet.acquire_trainer("b", 10)
    assert not await fleet.renew_trainer("b", 10)
    assert not await fleet.release_trainer("b")
    assert (await fleet.facts()).trainer == "a"
    holder, left_s = await fleet.trainer_holder() or ("nobody", 0.0)
    assert (holder, 0 < left_s <= 10) == ("a", True)
    assert await fleet.release_trainer("a")
    assert await fleet.trainer_holder() is None
    assert not await fleet.renew_trainer("a", 10)
    assert await fleet.acquire_trainer("b", 10)


async def test_a_trainer_that_leaves_takes_its_address_along_and_leaves_that_of_another(fleet: Fleet) -> None:
    addresses = [Endpoints(announce="tcp://a:1", tiles=f"tcp://a:{port}", session="x") for port in (2, 3)]
    await fleet.acquire_trainer("a", 10)
    await fleet.set_endpoints(addresses[0])
    assert await fleet.release_trainer("a")
    assert await fleet.endpoints() is None
    await fleet.acquire_trainer("b", 10)
    await fleet.set_endpoints(addresses[1])
    assert not await fleet.release_trainer("a")
    assert await fleet.endpoints() == addresses[1]


async def test_lock_of_a_dead_trainer_expires(fleet: Fleet) -> None:
    await fleet.acquire_trainer("a", 0.05)
    async with asyncio.timeout(180):
        while True:
            if await fleet.acquire_trainer("b", 10):
                break
            await asyncio.sleep(0.01)


async def test_version_never_falls(fleet: Fleet) -> None:
    assert await fleet.version() is None
    assert await fleet.set_version(0) == 0
    assert await fleet.set_version(7) == 7
    assert await fleet.set_version(3) == 7
    assert await fleet.version() == 7
    assert (await fleet.register(worker())).weight_version == 7


async def test_endpoints_travel_through_the_registry(fleet: Fleet) -> None:
    assert await fleet.endpoints() is None
    endpoints = Endpoints(announce="tcp://h:1", tiles="tcp://h:2", session="s", public_key="k")
    await fleet.set_endpoints(endpoints)
    assert await fleet.endpoints() == endpoints


@pytest.mark.parametrize(
    "value", [b"", b"\xff", b"{", b"7", b"[]", b"{}", b'{"announce": 1, "tiles": "", "session": ""}', b'{"tiles": "t"}']
)
async def test_an_address_that_no_trainer_has_written_is_none(
    fleet: Fleet, redis: Redis, keys: Keys, value: bytes
) -> None:
    await redis.execute_command("HSET", keys.meta, "endpoints", value)
    assert await fleet.endpoints() is None


async def test_first_worker_fixes_the_settings_and_a_different_one_may_not_join(fleet: Fleet) -> None:
    run_id = await fleet.join({"model.path": '"a"', "lora.rank": "8"}, resolved="[model]")
    assert await fleet.join({"model.path": '"a"', "lora.rank": "8"}) == run_id
    with pytest.raises(RunConflictError, match=r'model\.path = "b" here, "a" in the run'):
        await fleet.join({"model.path": '"b"', "lora.rank": "8"})


async def test_refused_worker_leaves_no_trace_in_the_agreement(fleet: Fleet) -> None:
    await fleet.join({"lora.rank": "8"})
    with pytest.raises(RunConflictError):
        await fleet.join({"lora.rank": "9", "lora.alpha": "32.0"})
    await fleet.join({"lora.rank": "8", "lora.alpha": "16.0"})


async def test_two_runs_on_one_server_do_not_see_each_other(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    other = Fleet(redis, Keys(f"{keys.run}-other"))
    await fleet.register(worker())
    await fleet.pause()
    await fleet.join({"lora.rank": "8"})
    assert await other.workers() == []
    assert (await other.facts()).run_id is None
    assert not (await other.facts()).is_paused


async def test_a_run_that_is_over_can_be_forgotten_and_nothing_else_is_touched(redis: Redis, keys: Keys) -> None:
    fleet = Fleet(redis, keys)
    await redis.set(f"other:{keys.run}", "stays")
    await fleet.join({"model.path": "a"})
    worker = WorkerInfo(worker_id="w", role="scorer", host="h", pid=1)
    await fleet.register(worker)
    with pytest.raises(RunConflictError, match="w still at work"):
        await fleet.forget_run()
    await fleet.deregister("w")
    assert await fleet.forget_run() > 0
    assert [key async for key in redis.scan_iter(match=keys.pattern)] == []
    assert await redis.delete(f"other:{keys.run}") == 1
    await fleet.join({"model.path": "b"})


async def test_a_lock_that_expired_is_renewed_only_by_its_last_holder(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    assert await fleet.acquire_trainer("a", 10)
    await redis.delete(keys.trainer_lock)  # as when it expires
    assert await fleet.renew_trainer("a", 10)
    await redis.delete(keys.trainer_lock)
    assert await fleet.acquire_trainer("b", 10)
    assert await fleet.release_trainer("b")
    # b came and went; what a has is old.
    assert not await fleet.renew_trainer("a", 10)
    with pytest.raises(TrainerReplacedError, match="another trainer"):
        await fleet.hold_trainer("a", 10)


@pytest.mark.parametrize(
    "value", [b"", b"garbage", b"1 2", b"a b {}", b"1 2 [3]", b"1 2 {", b"\xff \xff \xff", b"1 2 null"]
)
async def test_what_no_worker_wrote_into_the_registry_is_passed_over(
    fleet: Fleet, redis: Redis, keys: Keys, value: bytes
) -> None:
    await fleet.register(WorkerInfo(worker_id="scorer-a", role="scorer", host="here", pid=1))
    await redis.hset(keys.workers, "\udcff".encode("utf-8", "surrogateescape"), value)  # type: ignore[misc]
    assert [worker.worker_id for worker in await fleet.workers()] == ["scorer-a"]


async def test_a_worker_of_another_version_that_says_less_is_there(fleet: Fleet, redis: Redis, keys: Keys) -> None:
    seconds, _ = await redis.time()
    await redis.hset(keys.workers, "scorer-b", f'{seconds}000000 {seconds}000000 {{"role":"scorer"}}')  # type: ignore[misc]
    (worker,) = await fleet.workers()
    assert (worker.role, worker.is_alive, worker.status) == ("scorer", True, {})
