"""What stays in a store and what goes: publishers that die or cannot write, readers that are slow."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.weights.codec import Encoder
from pipeline.weights.store.folder import open_folder
from pipeline.weights.store.pointer import decode_pointer
from pipeline.weights.store.publisher import StorePublisher
from pipeline.weights.store.subscriber import StoreSubscriber
from pipeline.weights.store.writer import Writer
from pipeline.weights.subscriber_stats import Phase
from tests.weights.drift import drifted
from tests.weights.states import at, make_state, next_within, same, until
from tests.weights.stores import (
    FILE_BYTES,
    RUN,
    Elsewhere,
    endpoints,
    files_of,
    publishing,
    settings_for,
    state_of,
    store_channel,
    written,
)


async def test_a_publisher_that_is_killed_in_mid_write_leaves_its_readers_on_the_version_before(store: str) -> None:
    if store.startswith("memory"):
        pytest.skip("no other process sees this one's memory")
    settings = settings_for(store, encoding="delta")
    async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
        with Elsewhere("tests.weights.store_writer", store, RUN) as writer:
            assert await writer.line() == "a version is readable"
            assert same(await next_within(subscriber, None), drifted(0))
            assert await writer.line() == "the next one is half there"
        waiting = asyncio.create_task(next_within(subscriber, 0))
        async with StoreSubscriber(settings, resolve=at(endpoints())) as joiner:
            assert same(await next_within(joiner, None), drifted(0))
        assert not waiting.done()
        with publishing(settings) as publisher:
            assert publisher.newest == 0
            publisher.publish(drifted(2))
            assert same(await waiting, drifted(2))
            await written(publisher)
            if "://" not in store:
                versions = {int(name[:19]) for name in files_of(Path(store)) if name != "current"}
                assert versions <= {0, 2}, "what was half there is gone"
                assert not files_of(Path(store), ending=".writing")


async def test_a_reader_that_lost_its_files_takes_the_newest(tmp_path: Path) -> None:
    async with store_channel(settings_for(str(tmp_path), store_grace_s=0.001)) as (publisher, subscriber):
        publisher.publish(state_of(1))
        await written(publisher)
        hidden = tmp_path / RUN / files_of(tmp_path, ending=".tiles")[-1]
        hidden.unlink()
        waiting = asyncio.create_task(next_within(subscriber, None))
        await until(lambda: subscriber.stats.num_lost_tiles >= 1)
        for version in (2, 3, 4):
            publisher.publish(state_of(version))
            await written(publisher)
        state = await waiting
        assert state.weight_version > 1
        assert same(state, state_of(state.weight_version))


async def test_a_version_that_was_overtaken_stays_whole_for_the_grace_however_fast_others_follow(
    tmp_path: Path,
) -> None:
    async with store_channel(settings_for(str(tmp_path), store_grace_s=600.0, poll_s=0.5)) as (publisher, subscriber):
        publisher.publish(state_of(1))
        await written(publisher)
        first = {name for name in files_of(tmp_path) if name != "current"}
        aside = tmp_path / "aside"
        hidden = tmp_path / RUN / files_of(tmp_path, ending=".tiles")[-1]
        hidden.rename(aside)
        hidden.mkdir()  # a file that is there and cannot be read: a store that is slow
        waiting = asyncio.create_task(next_within(subscriber, None))
        await until(lambda: subscriber.stats.phase is Phase.STORE)
        for version in (2, 3, 4, 5):
            publisher.publish(state_of(version))
            await written(publisher)
        hidden.rmdir()
        aside.rename(hidden)
        state = await waiting
        assert same(state, state_of(state.weight_version))
        assert first <= set(files_of(tmp_path))
        versions = {int(name[:19]) for name in files_of(tmp_path, ending=".manifest")}
        assert versions == {1, 4, 5}, "the newest, the one before, and the first that was overtaken"


async def test_a_publisher_that_is_always_faster_starves_no_reader_within_the_grace(
    tmp_path: Path,
) -> None:
    stop = threading.Event()

    def hammer(publisher: StorePublisher) -> None:
        """Several versions for each that can be read; more would only be files to remove."""
        versions = itertools.count()
        while not stop.wait(0.02):
            publisher.publish(state_of(next(versions)))

    slow = settings_for(str(tmp_path), store_grace_s=5.0, max_mbit_per_s=32.0, encoding="snapshot")
    with publishing(slow) as publisher:
        thread = threading.Thread(target=hammer, args=(publisher,))
        thread.start()
        try:
            last = None
            async with StoreSubscriber(slow, resolve=at(endpoints())) as subscriber:
                for _ in range(2):
                    state = await next_within(subscriber, last)
                    assert same(state, state_of(state.weight_version))
                    last = state.weight_version
                assert subscriber.stats.num_skipped > 0
        finally:
            stop.set()
            thread.join()


def total_bytes(folder: Path) -> int:
    return sum(map(size_of, folder.iterdir()))


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # removed between the two looks
        return 0


async def test_what_is_kept_is_bounded_whatever_is_published(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("not ours")
    with publishing(settings_for(str(tmp_path), store_grace_s=0.001, encoding="delta")) as publisher:
        (tmp_path / RUN / "readme.txt").write_text("not ours either")
        for version in range(12):
            publisher.publish(drifted(version))
            await written(publisher)
        size = drifted(0).num_bytes
        await until(lambda: len(files_of(tmp_path, ending=".manifest")) == 1)
        await until(lambda: total_bytes(tmp_path / RUN) < 1.7 * size)
        pointer = decode_pointer((tmp_path / RUN / "current").read_bytes())
        assert 1 < len(pointer.steps) < 12
        assert sum(step.num_bytes for step in pointer.steps) <= size / 2
        assert len(files_of(tmp_path, ending=".patches")) == len(pointer.steps)
    assert (tmp_path / "keep").exists()
    assert (tmp_path / RUN / "readme.txt").exists()


async def test_a_full_disk_is_told_and_survived(tmp_path: Path) -> None:
    with publishing(settings_for(str(tmp_path))) as publisher, capture_logs() as logs:
        publisher.publish(state_of(1))
        await written(publisher)
        full = tmp_path / RUN / "current.writing"
        full.symlink_to("/dev/full")
        publisher.publish(state_of(2))
        await written(publisher, failures=1)
        async with StoreSubscriber(settings_for(str(tmp_path)), resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), state_of(1)), "what was readable stays so"
            publisher.publish(state_of(3))
            state = await next_within(subscriber, 1)
            assert same(state, state_of(state.weight_version))
            await written(publisher)
    said = [entry for entry in logs if entry["event"] == "weights_not_written"]
    assert said
    assert "No space left" in said[0]["reason"]


async def test_a_full_disk_costs_versions_that_were_overtaken_first(tmp_path: Path) -> None:
    with publishing(settings_for(str(tmp_path), store_grace_s=600.0)) as publisher:
        for version in (0, 1, 2):
            publisher.publish(state_of(version))
            await written(publisher)
        assert len(files_of(tmp_path, ending=".manifest")) == 3
        (tmp_path / RUN / "current.writing").symlink_to("/dev/full")
        publisher.publish(state_of(3))
        await written(publisher)
        assert publisher.stats.num_failures == 1
        assert {int(name[:19]) for name in files_of(tmp_path, ending=".manifest")} == {2, 3}


async def test_a_store_that_is_away_is_waited_for_by_both_ends(tmp_path: Path) -> None:
    share, elsewhere = tmp_path / "share", tmp_path / "elsewhere"
    share.mkdir()
    async with store_channel(settings_for(str(share))) as (publisher, subscriber):
        publisher.publish(state_of(1))
        assert same(await next_within(subscriber, None), state_of(1))
        share.rename(elsewhere)
        for version in (2, 3):
            publisher.publish(state_of(version))
        await written(publisher, failures=1)
        waiting = asyncio.create_task(next_within(subscriber, 1))
        elsewhere.rename(share)
        assert same(await waiting, state_of(3))


async def test_a_publisher_that_was_thought_dead_does_not_turn_back_its_successor(store: str) -> None:
    settings = settings_for(store)
    with publishing(settings) as old, publishing(settings) as new, capture_logs() as logs:
        old.publish(make_state(1))
        await written(old)
        new.publish(make_state(5))
        await written(new)
        old.publish(make_state(2))
        await written(old)
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), make_state(5))
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["weights_refused"]


async def test_a_publisher_that_was_thought_dead_removes_nothing_of_its_successor(store: str) -> None:
    now = [0.0]
    writers, encoders = [], []
    for session in (bytes(16), bytes(range(16))):
        encoders.append(Encoder(session=session, tile_bytes=16_384))
        writers.append(
            Writer(
                open_folder(store, RUN),
                encoders[-1],
                session=session,
                file_bytes=FILE_BYTES,
                grace_s=10.0,
                makes_patches=True,
                clock=lambda: now[0],
            )
        )
    old, new = writers
    old.take_over()
    for version in (1, 2):
        old.write(encoders[0].encode(drifted(version)), lambda: None)
    new.take_over()
    new.write(encoders[1].encode(drifted(5)), lambda: None)
    assert old.sweep_in_s == 10.0
    now[0] = 11.0
    old.sweep()
    async with StoreSubscriber(settings_for(store), resolve=at(endpoints())) as subscriber:
        assert same(await next_within(subscriber, None), drifted(5))
    for part in (*writers, *encoders):
        part.close()


async def test_a_garbled_pointer_does_not_stop_the_next_publisher(tmp_path: Path) -> None:
    settings = settings_for(str(tmp_path))
    with publishing(settings) as publisher:
        publisher.publish(state_of(4))
    (tmp_path / RUN / "current").write_bytes(b"garbage")
    with publishing(settings) as publisher:
        assert publisher.newest == 4
        publisher.publish(state_of(5))
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), state_of(5))
