"""One receiver for all generators of a machine: others map what it has, and take over when it is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from pipeline.errors import ServiceUnavailableError
from pipeline.places import make_folder, own_folder
from pipeline.weights import Endpoints, WeightPublisher
from pipeline.weights.channel import create_subscriber
from pipeline.weights.host_memory import HostPool, map_shared
from pipeline.weights.meeting import enter, leave, remove_abandoned
from pipeline.weights.sharing import CURRENT, SharedSubscriber
from pipeline.weights.subscriber import WeightSubscriber
from tests.weights.drift import drifted
from tests.weights.states import DEADLINE_S, FAST, at, checksum, make_state, next_within, same, until

DELTA = FAST.model_copy(update={"encoding": "delta", "tile_bytes": 16_384})
ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 300


@dataclass(frozen=True)
class Line:
    """What a neighbour says."""

    version: int
    checksum: str
    is_receiving: bool
    num_patched: int


class Neighbour:
    """A process that follows."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self, version: int) -> Line:
        """What it says of the first version that is not older."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while True:
                words = (await self.process.stdout.readline()).split()
                assert words, "it has ended"
                if words[0].isdigit() and int(words[0]) >= version:  # the others are of its log
                    return Line(int(words[0]), words[1].decode(), words[2] == b"1", int(words[3]))

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def neighbours(folder: Path, endpoints: Endpoints, number: int) -> AsyncIterator[list[Neighbour]]:
    """So many processes that share a folder."""
    words = ["-m", "tests.weights.neighbour", str(folder), json.dumps(asdict(endpoints))]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        Neighbour(
            await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE, env=environ)
        )
        for _ in range(number)
    ]
    try:
        yield started
    finally:
        for neighbour in started:
            await neighbour.end()


async def test_one_receives_and_all_have_every_byte(tmp_path: Path) -> None:
    with WeightPublisher(DELTA) as publisher:
        endpoints = publisher.start()
        publisher.publish(drifted(0))
        async with neighbours(tmp_path, endpoints, 3) as all_of_them:
            for version in range(4):
                lines = [await neighbour.line(version) for neighbour in all_of_them]
                assert {line.checksum for line in lines} == {checksum(drifted(version))}
                assert sum(line.is_receiving for line in lines) == 1
                publisher.publish(drifted(version + 1))
            await all_of_them[0].line(4)
        server = publisher.stats.server
        assert server.num_manifests == 1
        assert server.num_patch_tables == 4


async def test_who_went_on_alone_receives_for_all_once_the_lost_receiver_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.weights.sharing._LOST_AFTER_S", 0.3)
    with WeightPublisher(DELTA) as publisher:
        endpoints = publisher.start()
        publisher.publish(drifted(0))
        async with neighbours(tmp_path, endpoints, 1) as (first,):
            assert (await first.line(0)).is_receiving
            first.process.send_signal(signal.SIGSTOP)
            async with SharedSubscriber(DELTA, resolve=at(endpoints), folder=tmp_path) as other:
                publisher.publish(drifted(1))
                await next_within(other, 0)
                await first.end()
                for version in range(2, 12):
                    # What it begins alone must not meet what it receives for all.
                    publisher.publish(drifted(version))
                    state = await next_within(other, version - 1)
                    assert checksum(state) == checksum(drifted(version))
                async with SharedSubscriber(DELTA, resolve=at(endpoints), folder=tmp_path) as third:
                    assert checksum(await next_within(third, None)) == checksum(drifted(11))
                    assert not third.is_receiving


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_another_takes_over_from_a_receiver_that_is_gone_or_stands_still(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.weights.sharing._LOST_AFTER_S", 2.0)
    with WeightPublisher(DELTA) as publisher:
        endpoints = publisher.start()
        publisher.publish(drifted(0))
        async with neighbours(tmp_path, endpoints, 1) as (first,):
            assert (await first.line(0)).is_receiving
            async with SharedSubscriber(DELTA, resolve=at(endpoints), folder=tmp_path) as other:
                assert same(await next_within(other, None), drifted(0))
                assert not other.is_receiving
                first.process.send_signal(number)
                publisher.publish(drifted(1))
                state = await next_within(other, 0)
                assert same(state, drifted(1))
                assert other.is_receiving
                # From what it had mapped: a receiver that takes over does not begin anew.
                assert other.stats.num_patched == (1 if number is signal.SIGKILL else 0)


async def test_a_newcomer_has_what_is_there_at_once_and_needs_no_publisher(tmp_path: Path) -> None:
    gone: list[Endpoints] = []

    async def resolve() -> Endpoints | None:
        return gone[0] if gone else None

    with WeightPublisher(DELTA) as publisher:
        gone.append(publisher.start())
        publisher.publish(drifted(0))
        async with SharedSubscriber(DELTA, resolve=resolve, folder=tmp_path) as receiver:
            await next_within(receiver, None)
            publisher.close()
            gone.clear()
            async with SharedSubscriber(DELTA, resolve=resolve, folder=tmp_path) as newcomer:
                assert same(await next_within(newcomer, None), drifted(0))
                assert (newcomer.stats.num_mapped, newcomer.stats.num_received_bytes) == (1, 0)


async def test_a_newcomer_has_what_is_there_also_after_the_one_who_received_it_has_gone(tmp_path: Path) -> None:
    with WeightPublisher(DELTA) as publisher:
        endpoints = publisher.start()
        publisher.publish(drifted(0))
        async with neighbours(tmp_path, endpoints, 1) as (first,):
            await first.line(0)
            async with SharedSubscriber(DELTA, resolve=at(endpoints), folder=tmp_path) as other:
                await next_within(other, None)
                following = asyncio.create_task(next_within(other, 0))
                await first.end()
                await until(lambda: other.is_receiving)
                async with SharedSubscriber(DELTA, resolve=at(endpoints), folder=tmp_path) as newcomer:
                    assert same(await next_within(newcomer, None), drifted(0))
                    assert (newcomer.is_receiving, newcomer.stats.num_mapped) == (False, 1)
                    publisher.publish(drifted(1))
                    assert same(await next_within(newcomer, 0), drifted(1))
                    assert same(await following, drifted(1))
                    assert (newcomer.is_receiving, newcomer.stats.num_mapped) == (False, 2)


async def test_a_state_stays_as_it_is_while_someone_on_the_machine_holds_it(tmp_path: Path) -> None:
    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        async with (
            SharedSubscriber(FAST, resolve=at(endpoints), folder=tmp_path) as receiver,
            SharedSubscriber(FAST, resolve=at(endpoints), folder=tmp_path) as other,
        ):
            held = []
            for version in range(6):
                publisher.publish(make_state(version))
                await next_within(receiver, version - 1)
                held.append(await next_within(other, version - 1))
            assert all(same(state, make_state(version)) for version, state in enumerate(held))
            assert other.stats.num_mapped == 6


async def test_two_buffers_are_enough_for_those_that_keep_up(tmp_path: Path) -> None:
    pool = HostPool(5_000)
    places = set()
    for number in range(6):
        loan = pool.borrow()
        loan[:4] = number.to_bytes(4, "little")
        place = pool.share(loan)
        places.add(place["path"])
        seen = map_shared(place, 5_000)
        assert seen is not None
        assert int.from_bytes(seen.buffer[:4], "little") == number
        del loan, seen
    assert len(places) == 1
    held = pool.borrow()
    place = pool.share(held)
    kept = map_shared(place, 5_000)
    del held
    assert pool.share(pool.borrow())["path"] != place["path"], "one that somebody reads is not written"
    assert kept is not None


async def test_memory_that_cannot_be_reached_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.weights.sharing._LOST_AFTER_S", 0.1)
    with WeightPublisher(DELTA) as publisher:
        endpoints = publisher.start()
        publisher.publish(drifted(0))
        async with SharedSubscriber(DELTA, resolve=at(endpoints), folder=tmp_path) as receiver:
            await next_within(receiver, None)
            # As from another container, where the receiver's process has another number.
            told, here = (tmp_path / CURRENT).read_bytes(), str(os.getpid())
            (tmp_path / CURRENT).write_bytes(
                told.replace(f"/proc/{here}/".encode(), f"/proc/{'9' * len(here)}/".encode())
            )
            async with SharedSubscriber(DELTA, resolve=at(endpoints), folder=tmp_path) as other:
                assert same(await next_within(other, None), drifted(0))
                assert other.is_receiving


async def test_what_nobody_can_go_on_without_is_raised(tmp_path: Path) -> None:
    async def resolve() -> Endpoints | None:
        raise ServiceUnavailableError("no registry")

    async with SharedSubscriber(FAST, resolve=resolve, folder=tmp_path) as subscriber:
        with pytest.raises(ServiceUnavailableError, match="no registry"):
            await next_within(subscriber, None)


async def test_the_last_one_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(0))
        async with SharedSubscriber(FAST, resolve=at(endpoints), folder=folder) as receiver:
            await next_within(receiver, None)
            async with SharedSubscriber(FAST, resolve=at(endpoints), folder=folder) as other:
                await next_within(other, None)
            assert folder.exists()
        assert not folder.exists()


async def test_what_killed_processes_left_is_removed_by_those_who_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = own_folder("weights of run 1")
    unrelated = own_folder("something else")
    with WeightPublisher(DELTA) as publisher:
        publisher.publish(drifted(0))
        async with neighbours(left, publisher.start(), 1) as (first,):
            await first.line(0)
            create_subscriber(FAST, at(None), run_id="2").close()
            assert left.exists(), "somebody is in it"
    assert left.exists(), "it was killed"
    create_subscriber(FAST, at(None), run_id="2").close()
    assert (left.exists(), unrelated.exists()) == (False, True)


def test_those_who_come_and_go_at_once_do_not_stand_in_each_others_way(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def come_and_go(number: int) -> None:
        """Every third time nobody is left to remove what a killed process had."""
        together.wait()
        for times in range(NUM_ROUNDS):
            folder = tmp_path / f"rollstream-{os.getuid()}-{(number + times) % 2}"
            make_folder(folder)
            remove_abandoned(folder)
            users = enter(folder)
            assert folder.exists()
            if (times + 1) % 3:
                leave(folder, users)
            else:
                os.close(users)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))


def test_sharing_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for shares, kind in ((True, SharedSubscriber), (False, WeightSubscriber)):
        settings = FAST.model_copy(update={"share_on_host": shares})
        made = create_subscriber(settings, at(None), run_id="0")
        assert type(made) is kind
        made.close()
    assert not list(tmp_path.iterdir())
