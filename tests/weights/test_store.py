"""Weights through files when nothing breaks: directories, memory and S3."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.engines.vllm_pull import WeightPull
from pipeline.errors import WeightError
from pipeline.weights import Endpoints, WeightKind, WeightState
from pipeline.weights.sharing import SharedSubscriber
from pipeline.weights.store.publisher import StorePublisher
from pipeline.weights.store.subscriber import StoreSubscriber
from pipeline.weights.subscriber_stats import Phase
from tests.weights.drift import drifted
from tests.weights.states import at, make_state, next_within, same, tensor, until
from tests.weights.stores import Elsewhere, endpoints, files_of, publishing, settings_for, store_channel, written


async def followed(publisher: StorePublisher, subscriber: StoreSubscriber, *versions: int) -> list[WeightState]:
    """Each version, published once the one before is there."""
    received: list[WeightState] = []
    for version in versions:
        publisher.publish(drifted(version))
        received.append(await next_within(subscriber, received[-1].weight_version if received else None))
    return received


async def test_tensors_arrive_bit_for_bit_under_their_version(store: str) -> None:
    odd = np.array([np.nan, -0.0, np.inf, -np.inf, 1e-40], dtype=np.float32)
    state = WeightState(
        weight_version=7,
        kind=WeightKind.ADAPTER,
        tensors={
            "scalar": tensor(np.float32(3.5), "float32", ()),
            "empty": tensor(np.empty((3, 0, 2), np.float32), "float32"),
            "odd": tensor(odd, "float32"),
            "large": tensor(np.arange(100_000, dtype=np.int64), "int64"),
        },
    )
    async with store_channel(settings_for(store)) as (publisher, subscriber):
        publisher.publish(state)
        assert same(await next_within(subscriber, None), state)


async def test_a_state_of_nothing_but_empty_tensors_arrives(store: str) -> None:
    state = WeightState(weight_version=0, kind=WeightKind.SNAPSHOT, tensors={"a": tensor(np.empty(0), "float64")})
    async with store_channel(settings_for(store)) as (publisher, subscriber):
        publisher.publish(state)
        assert same(await next_within(subscriber, None), state)


async def test_only_what_changed_is_read_by_a_follower_and_everything_by_a_joiner(store: str) -> None:
    settings = settings_for(store, encoding="delta")
    async with store_channel(settings) as (publisher, subscriber):
        received = await followed(publisher, subscriber, *range(5))
        stats = subscriber.stats
        async with StoreSubscriber(settings, resolve=at(endpoints())) as joiner:
            assert same(await next_within(joiner, None), drifted(4))
    assert all(same(state, drifted(version)) for version, state in enumerate(received))
    assert (stats.num_versions, stats.num_patched) == (5, 4)
    assert stats.num_received_bytes < 1.2 * received[0].num_bytes


async def test_a_reader_that_is_behind_folds_what_it_missed(store: str) -> None:
    async with store_channel(settings_for(store, encoding="delta")) as (publisher, subscriber):
        await followed(publisher, subscriber, 0, 1)
        for version in range(2, 6):
            publisher.publish(drifted(version))
            await written(publisher)
        assert same(await next_within(subscriber, 1), drifted(5))
        assert (subscriber.stats.num_patched, subscriber.stats.num_skipped) == (2, 3)


async def test_adapters_are_patched_like_full_weights(tmp_path: Path) -> None:
    async with store_channel(settings_for(str(tmp_path), encoding="delta")) as (publisher, subscriber):
        for version in range(3):
            state = replace(drifted(version), kind=WeightKind.ADAPTER)
            publisher.publish(state)
            assert same(await next_within(subscriber, version - 1 if version else None), state)
        assert subscriber.stats.num_patched == 2


async def test_a_version_without_a_change_is_patched_by_nothing(tmp_path: Path) -> None:
    async with store_channel(settings_for(str(tmp_path), encoding="delta")) as (publisher, subscriber):
        await followed(publisher, subscriber, 0, 1)
        publisher.publish(replace(drifted(1), weight_version=2))
        assert same(await next_within(subscriber, 1), replace(drifted(1), weight_version=2))
        assert subscriber.stats.num_patched == 2


@pytest.mark.parametrize("other", [drifted(2, name="renamed"), make_state(2)], ids=["other tensors", "other layout"])
async def test_what_cannot_be_patched_comes_whole(tmp_path: Path, other: WeightState) -> None:
    async with store_channel(settings_for(str(tmp_path), encoding="delta")) as (publisher, subscriber):
        await followed(publisher, subscriber, 0, 1)
        publisher.publish(other)
        assert same(await next_within(subscriber, 1), other)
        assert subscriber.stats.num_patched == 1


@pytest.mark.parametrize("sends", ["snapshot", "delta"])
async def test_either_end_alone_can_do_without_patches(tmp_path: Path, sends: str) -> None:
    receives = "delta" if sends == "snapshot" else "snapshot"
    with publishing(settings_for(str(tmp_path), encoding=sends)) as publisher:
        reading = settings_for(str(tmp_path), encoding=receives)
        async with StoreSubscriber(reading, resolve=at(endpoints())) as subscriber:
            assert same((await followed(publisher, subscriber, 0, 1, 2))[2], drifted(2))
            assert subscriber.stats.num_patched == 0
    assert bool(files_of(tmp_path, ending=".patches")) == (sends == "delta")


async def test_a_subscriber_may_be_there_long_before_the_publisher_and_the_store(tmp_path: Path) -> None:
    found: list[Endpoints] = []

    async def resolve() -> Endpoints | None:
        return found[0] if found else None

    settings = settings_for(str(tmp_path / "share"))
    async with StoreSubscriber(settings, resolve=resolve) as subscriber:
        waiting = asyncio.create_task(next_within(subscriber, None))
        await until(lambda: subscriber.stats.phase is Phase.ADDRESS)
        found.append(endpoints())
        await until(lambda: subscriber.stats.phase is Phase.VERSION)
        (tmp_path / "share").mkdir()
        with publishing(settings) as publisher:
            publisher.publish(make_state(1))
            assert same(await waiting, make_state(1))


async def test_what_was_published_does_not_change_with_the_trainers_tensors(tmp_path: Path) -> None:
    live = np.arange(500_000, dtype=np.float32)
    held = live.data.cast("B")
    before = bytes(held)
    async with store_channel(settings_for(str(tmp_path))) as (publisher, subscriber):
        publisher.publish(replace(make_state(0), tensors={"a": replace(tensor(live, "float32"), data=held)}))
        live += 1
        received = await next_within(subscriber, None)
    assert bytes(received.tensors["a"].data) == before


async def test_publishing_waits_for_no_write_and_the_newest_version_wins(tmp_path: Path) -> None:
    with publishing(settings_for(str(tmp_path))) as publisher:
        for version in range(30):
            publisher.publish(make_state(version, num_bytes=400_000))
        await written(publisher)
        assert publisher.stats.num_versions == 30
        assert publisher.stats.server.num_announcements < 30
        async with StoreSubscriber(settings_for(str(tmp_path)), resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), make_state(29, num_bytes=400_000))


async def test_the_last_version_is_written_although_the_publisher_ends(tmp_path: Path) -> None:
    settings, before = settings_for(str(tmp_path)), set(threading.enumerate())
    with publishing(settings) as publisher:
        publisher.publish(make_state(1))
    publisher.close()
    async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
        assert same(await next_within(subscriber, None), make_state(1))
        subscriber.close()
    await until(lambda: not any(thread.name.startswith("weight-") for thread in set(threading.enumerate()) - before))


async def test_a_version_that_is_not_newer_is_refused_also_after_a_restart(store: str) -> None:
    settings = settings_for(store)
    for _ in range(2):
        with publishing(settings) as publisher:
            if publisher.newest < 3:
                publisher.publish(make_state(3))
            for version in (3, 2):
                with pytest.raises(WeightError, match="not newer"):
                    publisher.publish(replace(make_state(9), weight_version=version))
    with publishing(settings) as publisher:
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), make_state(3))
            publisher.publish(make_state(4))
            assert same(await next_within(subscriber, 3), make_state(4))


async def test_two_runs_share_a_store_and_see_nothing_of_each_other(store: str) -> None:
    settings = settings_for(store, store_grace_s=0.001)
    with publishing(settings, run="a.1") as first, publishing(settings, run="a.2") as second:
        for version in range(3):
            first.publish(make_state(version))
            second.publish(make_state(100 + version))
            await written(first)
            await written(second)
        for run, version in (("a.1", 2), ("a.2", 102)):
            async with StoreSubscriber(settings, resolve=at(endpoints(run))) as subscriber:
                assert same(await next_within(subscriber, None), make_state(version))


async def test_a_reader_in_another_process_gets_every_byte(store: str) -> None:
    if store.startswith("memory"):
        pytest.skip("no other process sees this one's memory")
    with (
        publishing(settings_for(store, encoding="delta")) as publisher,
        Elsewhere("tests.weights.store_reader", store, "run.1", 3) as reader,
    ):
        for version in range(3):
            publisher.publish(drifted(version))
            assert await reader.line() == [version, int(version > 0), True]


async def test_a_cancelled_wait_leaves_a_subscriber_that_works(tmp_path: Path) -> None:
    async with store_channel(settings_for(str(tmp_path))) as (publisher, subscriber):
        publisher.publish(make_state(0, num_bytes=2_000_000))
        for delay in (0.0, 0.001, 0.005, 0.02):
            waiting = asyncio.create_task(subscriber.next(None))
            await asyncio.wait([waiting], timeout=delay)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert same(await next_within(subscriber, None), make_state(0, num_bytes=2_000_000))


async def test_two_generators_of_a_machine_read_a_store_once(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    settings = settings_for(str(tmp_path / "store"), encoding="delta")
    with publishing(settings) as publisher:
        async with (
            SharedSubscriber(settings, resolve=at(endpoints()), folder=tmp_path / "meeting") as receiver,
            SharedSubscriber(settings, resolve=at(endpoints()), folder=tmp_path / "meeting") as other,
        ):
            for version in range(3):
                publisher.publish(drifted(version))
                for subscriber in (receiver, other):
                    assert same(await next_within(subscriber, version - 1 if version else None), drifted(version))
            assert (receiver.stats.num_mapped, other.stats.num_mapped) == (0, 3)
            assert (receiver.stats.num_patched, other.stats.num_received_bytes) == (2, 0)


async def test_a_reader_can_be_held_to_a_rate(tmp_path: Path) -> None:
    with publishing(settings_for(str(tmp_path))) as publisher:
        publisher.publish(make_state(1, num_bytes=400_000))
        await written(publisher)
        slow = settings_for(str(tmp_path), max_mbit_per_s=8.0)
        async with StoreSubscriber(slow, resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), make_state(1, num_bytes=400_000))
            assert subscriber.stats.receive_s > 0.25, "1 MB/s, but for what may come at once"


async def test_a_worker_of_a_server_elsewhere_fetches_from_a_store(tmp_path: Path) -> None:
    pull = WeightPull()
    settings = settings_for(str(tmp_path))
    with publishing(settings) as publisher:
        pull.follow(asdict(endpoints()), settings.model_dump(mode="json", include={"store", "poll_s"}), newer_than=-1)
        publisher.publish(make_state(3))
        await until(lambda: pull.status["weight_version"] == 3)
        assert same(pull.take(3), make_state(3))
        pull.close()
