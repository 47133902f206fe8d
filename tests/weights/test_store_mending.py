"""A store of which somebody removes what is readable, while nothing new is published."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.metrics import Metrics
from pipeline.weights.account import Account
from pipeline.weights.codec import Encoder
from pipeline.weights.store.folder import open_folder
from pipeline.weights.store.pointer import decode_pointer
from pipeline.weights.store.subscriber import StoreSubscriber
from pipeline.weights.store.writer import Writer
from tests.weights.drift import drifted
from tests.weights.states import at, make_state, next_within, same, until
from tests.weights.stores import FILE_BYTES, RUN, endpoints, files_of, publishing, settings_for, state_of, written

SOON_S = 0.05


@contextmanager
def writing(store: str, session: bytes = bytes(16)) -> Iterator[tuple[Writer, Encoder]]:
    encoder = Encoder(session=session, tile_bytes=16_384)
    writer = Writer(
        open_folder(store, RUN), encoder, session=session, file_bytes=FILE_BYTES, grace_s=600.0, makes_patches=True
    )
    writer.take_over()
    try:
        yield writer, encoder
    finally:
        writer.close()
        encoder.close()


def go_on() -> None:
    """There is time."""


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def without_pointer(folder: Path) -> None:
    (folder / "current").unlink()


def with_a_garbled_pointer(folder: Path) -> None:
    (folder / "current").write_bytes(b"garbage")


def without_tiles(folder: Path) -> None:
    for path in folder.glob("*.tiles-*"):
        path.unlink()


def renamed(folder: Path) -> None:
    folder.rename(folder.with_name("aside"))


AT_ONCE = [without_pointer, with_a_garbled_pointer, renamed]


@pytest.mark.parametrize("lose", [*AT_ONCE, without_tiles, emptied, shutil.rmtree])
async def test_whatever_is_gone_of_the_newest_version_is_put_back(
    tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    with writing(str(tmp_path)) as (writer, encoder):
        for version in (0, 1):
            writer.write(encoder.encode(drifted(version)), go_on)
        lose(tmp_path / RUN)
        assert writer.mend(go_on)
        assert writer.mend(go_on) == []
        settings = settings_for(str(tmp_path), encoding="delta")
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), drifted(1))
            writer.write(encoder.encode(drifted(2)), go_on)
            assert same(await next_within(subscriber, 1), drifted(2))
            assert subscriber.stats.num_patched == 1


@pytest.mark.parametrize("encoding", ["delta", "snapshot"])
@pytest.mark.parametrize("lose", AT_ONCE)
async def test_a_publisher_looks_after_what_is_readable_though_nothing_new_is_published(
    tmp_path: Path, lose: Callable[[Path], object], encoding: str
) -> None:
    settings = settings_for(str(tmp_path), encoding=encoding)
    with publishing(settings, look_every_s=SOON_S) as publisher, capture_logs() as logs:
        for version in (0, 1):
            publisher.publish(drifted(version))
            await written(publisher)
        lose(tmp_path / RUN)
        await until(lambda: any(entry["event"] == "weights_put_back" for entry in logs))
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), drifted(1))
            publisher.publish(drifted(2))
            assert same(await next_within(subscriber, 1), drifted(2))
            assert subscriber.stats.num_patched == int(encoding == "delta")
    (warning,) = (entry for entry in logs if entry["event"] == "weights_put_back")
    assert warning["weight_version"] == 1
    assert "weights.store" in warning["way_out"]


async def test_a_reader_that_waits_says_once_that_the_pointer_is_gone_and_gets_the_version(tmp_path: Path) -> None:
    settings = settings_for(str(tmp_path))
    with publishing(settings) as publisher, capture_logs() as logs:
        publisher.publish(state_of(1))
        await written(publisher)
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            assert same(await next_within(subscriber, None), state_of(1))
            emptied(tmp_path / RUN)
            waiting = asyncio.create_task(next_within(subscriber, 1))
            await until(lambda: any(entry["event"] == "weights_gone" for entry in logs))
            publisher.publish(state_of(2))
            assert same(await waiting, state_of(2))
    assert [entry["event"] for entry in logs].count("weights_gone") == 1


async def test_before_the_first_version_nothing_is_missed(tmp_path: Path) -> None:
    settings = settings_for(str(tmp_path))
    with publishing(settings, look_every_s=SOON_S) as publisher, capture_logs() as logs:
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            waiting = asyncio.create_task(next_within(subscriber, None))
            publisher.publish(state_of(1))
            assert same(await waiting, state_of(1))
    assert [entry for entry in logs if entry["log_level"] != "debug"] == []


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = [lambda data: data[:-100], lambda data: b"", flipped, lambda data: data + b"more"]


@pytest.mark.parametrize("damage", DAMAGES, ids=["cut off", "empty", "changed", "too long"])
@pytest.mark.parametrize("ending", [".tiles-000003", ".manifest"])
def test_files_that_are_there_and_wrong_are_written_again(
    store: str, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    folder = open_folder(store, RUN)
    with writing(store) as (writer, encoder):
        for version in (0, 1):
            writer.write(encoder.encode(drifted(version)), go_on)
            writer.sweep()  # as a publisher does behind each version
        name = max(name for name in folder.names() if name.endswith(ending))
        good = folder.read(name, FILE_BYTES * 2)
        folder.write(name, [damage(good)])
        assert writer.mend(go_on) == [name]
        assert folder.read(name, FILE_BYTES * 2) == good
        assert writer.mend(go_on) == []


def test_a_file_that_was_only_touched_is_read_and_left_alone(tmp_path: Path) -> None:
    with writing(str(tmp_path)) as (writer, encoder):
        writer.write(encoder.encode(drifted(0)), go_on)
        writer.sweep()
        num_bytes = writer.stats.num_bytes
        for path in (tmp_path / RUN).iterdir():
            os.utime(path, (1, 1))
        assert writer.mend(go_on) == []
        assert writer.stats.num_bytes == num_bytes


def test_what_rots_without_a_new_date_is_found_when_its_turn_comes(tmp_path: Path) -> None:
    with writing(str(tmp_path)) as (writer, encoder):
        writer.write(encoder.encode(drifted(0)), go_on)
        writer.sweep()
        files = sorted(path for path in (tmp_path / RUN).iterdir() if path.name != "current")
        for path in (files[0], files[-1]):
            status = path.stat()
            path.write_bytes(flipped(path.read_bytes()))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        found = [name for _ in files for name in writer.mend(go_on)]
        assert sorted(found) == [files[0].name, files[-1].name]


async def test_a_reader_counts_what_is_wrong_and_gets_the_version_once_it_is_put_back(store: str) -> None:
    settings, folder = settings_for(store), open_folder(store, RUN)
    with publishing(settings, look_every_s=SOON_S) as publisher, capture_logs() as logs:
        account = Account(publisher, metrics := Metrics("r", "trainer", "w"))
        publisher.publish(state_of(1))
        await written(publisher)
        name = max(name for name in folder.names() if ".tiles-" in name)
        folder.write(name, [flipped(folder.read(name, FILE_BYTES))])
        async with StoreSubscriber(settings, resolve=at(endpoints())) as subscriber:
            waiting = asyncio.create_task(next_within(subscriber, None))
            await until(lambda: subscriber.stats.num_corrupt_tiles >= 1 or waiting.done())
            assert same(await waiting, state_of(1))
        await until(lambda: publisher.stats.num_put_back == 1)
        account.update()
        assert metrics.weight_put_back_total._value.get() == 1
    assert [entry["first"] for entry in logs if entry["event"] == "weights_put_back"] == [name]


def test_nothing_is_written_while_all_is_there(store: str) -> None:
    with writing(store) as (writer, encoder):
        assert writer.mend(go_on) == []
        for version in (1, 2):
            writer.write(encoder.encode(drifted(version)), go_on)
        before = writer.stats.num_bytes
        assert writer.mend(go_on) == []
        assert writer.stats.num_bytes == before


def test_only_the_pointer_is_put_back_with_its_steps_where_the_files_are_there(tmp_path: Path) -> None:
    with writing(str(tmp_path)) as (writer, encoder):
        for version in (1, 2):
            writer.write(encoder.encode(drifted(version)), go_on)
        current = tmp_path / RUN / "current"
        before, num_bytes = current.read_bytes(), writer.stats.num_bytes
        current.unlink()
        assert writer.mend(go_on) == ["current"]
        assert current.read_bytes() == before
        assert writer.stats.num_bytes == num_bytes
        without_tiles(tmp_path / RUN)
        assert all(".tiles-" in name for name in writer.mend(go_on))
        assert not decode_pointer(current.read_bytes()).steps


def test_a_successors_version_is_left_alone_whatever_it_lacks(store: str) -> None:
    folder = open_folder(store, RUN)
    with writing(store) as (old, encoder), writing(store, bytes(range(16))) as (new, its_encoder):
        old.write(encoder.encode(make_state(1)), go_on)
        new.write(its_encoder.encode(make_state(5)), go_on)
        for name in folder.names():
            if name != "current":
                folder.remove(name)
        assert old.mend(go_on) == []
        assert folder.names() == ["current"]
        assert new.mend(go_on)
        assert len(folder.names()) > 1


def test_what_is_removed_between_two_attempts_is_written_again(tmp_path: Path) -> None:
    with writing(str(tmp_path)) as (writer, encoder):
        item = encoder.encode(state_of(1))
        aside = tmp_path / RUN / "current.writing"
        aside.symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            writer.write(item, go_on)
        emptied(tmp_path / RUN)
        writer.write(item, go_on)
        assert files_of(tmp_path, ending=".manifest")
        assert files_of(tmp_path, ending=".tiles")
        assert writer.mend(go_on) == []
