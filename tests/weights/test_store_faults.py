"""Files that are wrong, cut off, or gone; ends that move, differ or cannot begin."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.errors import ConfigError, ServiceUnavailableError, WeightError
from pipeline.weights import Endpoints, WeightPublisher, WeightSubscriber
from pipeline.weights.channel import create_publisher
from pipeline.weights.receiver import create_receiver
from pipeline.weights.store.folder import check_store
from pipeline.weights.store.pointer import decode_pointer, encode_pointer
from pipeline.weights.store.subscriber import StoreSubscriber
from pipeline.weights.subscriber_stats import Phase
from tests.weights.drift import drifted
from tests.weights.states import at, next_within, same, until
from tests.weights.stores import (
    RUN,
    endpoints,
    files_of,
    publishing,
    settings_for,
    state_of,
    store_channel,
    written,
)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [flip, cut, empty, Path.unlink]


def damaged(directory: Path, ending: str, damage: Callable[[Path], object]) -> Path:
    """A file of the newest version, after the damage."""
    path = directory / RUN / files_of(directory, ending=ending)[-1]
    damage(path)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_file_of_tiles_is_never_believed_and_only_it_is_read_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    async with store_channel(settings_for(str(tmp_path))) as (publisher, subscriber):
        publisher.publish(state_of(1))
        await written(publisher)
        good = {path.name: path.read_bytes() for path in (tmp_path / RUN).iterdir()}
        path = damaged(tmp_path, ".tiles", damage)
        waiting = asyncio.create_task(next_within(subscriber, None))
        await until(lambda: subscriber.stats.num_corrupt_tiles + subscriber.stats.num_lost_tiles >= 3)
        assert not waiting.done()
        for other in (tmp_path / RUN).iterdir():
            if ".tiles" in other.name and other != path:
                other.unlink()
        path.write_bytes(good[path.name])
        assert same(await waiting, state_of(1))
        assert subscriber.stats.num_received_bytes == subscriber.stats.num_bytes, "no tile was read twice"


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_tiles_are_forgotten_when_there_is_a_newer_version(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    async with store_channel(settings_for(str(tmp_path))) as (publisher, subscriber):
        publisher.publish(state_of(1))
        await written(publisher)
        damaged(tmp_path, ".tiles", damage)
        waiting = asyncio.create_task(next_within(subscriber, None))
        await until(lambda: subscriber.stats.num_corrupt_tiles + subscriber.stats.num_lost_tiles >= 1)
        publisher.publish(state_of(2))
        assert same(await waiting, state_of(2))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", [".patches", ".parcels"])
async def test_damaged_patches_make_way_for_a_snapshot(
    tmp_path: Path, ending: str, damage: Callable[[Path], object]
) -> None:
    async with store_channel(settings_for(str(tmp_path), encoding="delta")) as (publisher, subscriber):
        publisher.publish(drifted(0))
        assert same(await next_within(subscriber, None), drifted(0))
        publisher.publish(drifted(1))
        await written(publisher)
        damaged(tmp_path, ending, damage)
        assert same(await next_within(subscriber, 0), drifted(1))
        assert subscriber.stats.num_patched == 0
        publisher.publish(drifted(2))
        assert same(await next_within(subscriber, 1), drifted(2))
        assert subscriber.stats.num_patched == 1, "one bad step does not end patches for good"


async def test_patches_that_cannot_be_read_for_long_make_way_for_a_snapshot(tmp_path: Path) -> None:
    async with store_channel(settings_for(str(tmp_path), encoding="delta", poll_s=0.01)) as (publisher, subscriber):
        publisher.publish(drifted(0))
        assert same(await next_within(subscriber, None), drifted(0))
        publisher.publish(drifted(1))
        await written(publisher)
        path = tmp_path / RUN / files_of(tmp_path, ending=".parcels")[-1]
        path.unlink()
        path.mkdir()  # reading it fails, and not because it is gone
        assert same(await next_within(subscriber, 0), drifted(1))
        assert (subscriber.stats.num_patched, subscriber.stats.num_lost_tiles) == (0, 5)
        path.rmdir()


async def test_a_base_that_was_changed_in_memory_is_found_out_and_replaced(tmp_path: Path) -> None:
    import numpy as np

    async with store_channel(settings_for(str(tmp_path), encoding="delta")) as (publisher, subscriber):
        publisher.publish(drifted(0))
        state = await next_within(subscriber, None)
        np.frombuffer(state.tensors["embed"].data, dtype=np.uint8)[5] ^= 1
        publisher.publish(drifted(1))
        assert same(await next_within(subscriber, 0), drifted(1))
        assert (subscriber.stats.num_refused, subscriber.stats.num_patched) == (1, 0)


@pytest.mark.parametrize("name", ["current", ".manifest"])
@pytest.mark.parametrize("damage", [flip, cut, empty, lambda path: path.write_bytes(os.urandom(500)), Path.unlink])
async def test_a_damaged_pointer_or_manifest_is_waited_out(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    async with store_channel(settings_for(str(tmp_path))) as (publisher, subscriber):
        publisher.publish(state_of(1))
        assert same(await next_within(subscriber, None), state_of(1))
        damaged(tmp_path, name, damage)
        async with StoreSubscriber(settings_for(str(tmp_path)), resolve=at(endpoints())) as joiner:
            waiting = asyncio.create_task(next_within(joiner, None))
            await until(lambda: joiner.stats.num_refused + joiner.stats.num_lost_tiles >= 2 or is_idle(joiner))
            assert not waiting.done()
            publisher.publish(state_of(2))
            assert same(await waiting, state_of(2))


def is_idle(subscriber: StoreSubscriber) -> bool:
    return subscriber.stats.phase is Phase.VERSION


def test_no_byte_of_a_pointer_can_be_changed_unnoticed(tmp_path: Path) -> None:
    with publishing(settings_for(str(tmp_path), encoding="delta")) as publisher:
        publisher.publish(drifted(0))
    good = (tmp_path / RUN / "current").read_bytes()
    pointer = decode_pointer(good)
    assert encode_pointer(pointer) == good
    for position in range(len(good)):
        spoilt = bytearray(good)
        spoilt[position] ^= 4
        with pytest.raises(WeightError):
            decode_pointer(bytes(spoilt))


async def test_a_pointer_to_another_versions_manifest_is_refused(tmp_path: Path) -> None:
    async with store_channel(settings_for(str(tmp_path))) as (publisher, subscriber):
        publisher.publish(state_of(1))
        await written(publisher)
        current = tmp_path / RUN / "current"
        pointer = decode_pointer(current.read_bytes())
        lying = replace(pointer, weight_version=9)
        manifest = next(path for path in (tmp_path / RUN).iterdir() if path.name.endswith(".manifest"))
        shutil.copy(manifest, manifest.with_name(manifest.name.replace(f"{1:019d}", f"{9:019d}")))
        current.write_bytes(encode_pointer(lying))
        waiting = asyncio.create_task(next_within(subscriber, None))
        await until(lambda: subscriber.stats.num_refused >= 2)
        assert not waiting.done()
        current.write_bytes(encode_pointer(pointer))
        assert same(await waiting, state_of(1))


async def test_a_reader_follows_a_publisher_into_another_folder(tmp_path: Path) -> None:
    where = [endpoints("a.1")]

    async def resolve() -> Endpoints | None:
        return where[-1]

    settings = settings_for(str(tmp_path))
    with publishing(settings, run="a.1") as first, publishing(settings, run="a.2") as second:
        first.publish(state_of(1))
        second.publish(state_of(2))
        async with StoreSubscriber(settings, resolve=resolve) as subscriber:
            assert same(await next_within(subscriber, None), state_of(1))
            waiting = asyncio.create_task(next_within(subscriber, 1))
            where.append(endpoints("a.2"))
            assert same(await waiting, state_of(2))
            assert subscriber.stats.num_moves == 1


async def test_ends_that_use_different_channels_say_so_and_wait(tmp_path: Path) -> None:
    zeromq = Endpoints(announce="tcp://127.0.0.1:9", tiles="tcp://127.0.0.1:9", session="")
    through_files = settings_for(str(tmp_path))
    for settings, published in ((settings_for(""), endpoints()), (through_files, zeromq)):
        subscriber = create_receiver(settings, at(published))
        with capture_logs() as logs:
            waiting = asyncio.create_task(subscriber.next(None))
            await until(lambda logs=logs: bool(logs))
            waiting.cancel()
            await asyncio.wait([waiting])
        subscriber.close()
        assert [entry["event"] for entry in logs] == ["weights_elsewhere"]
        assert "set weights.store" in logs[0]["way_out"]
    for end in (WeightPublisher, functools.partial(WeightSubscriber, resolve=at(zeromq))):
        with pytest.raises(ConfigError, match=r"over ZeroMQ: pipeline\.weights\.create_"):
            end(through_files)


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        ("ftp://host/folder", "no store is known by 'ftp://'"),
        ("simplecache::s3://bucket", "no store is known"),
        ("s3://", "names no place"),
        ("gs://bucket/folder", "needs gcsfs: pip install gcsfs"),
        ("s3://user:password@bucket/folder", "holds a password"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_with_the_way_out(store: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        check_store(store)
    assert "weights.store" in str(caught.value)
    assert "password@" not in str(caught.value)
    with pytest.raises(ConfigError):
        create_publisher(settings_for(store), num_bytes=1, run=RUN)


def test_a_directory_that_is_not_there_ends_a_publisher_with_its_name(tmp_path: Path) -> None:
    publisher = create_publisher(settings_for(str(tmp_path / "nowhere")), num_bytes=1, run=RUN)
    with pytest.raises(ServiceUnavailableError, match=r"weights\.store = '.*nowhere' cannot be used"):
        publisher.start()
    publisher.close()
    assert not (tmp_path / "nowhere").exists()
