"""The life of a worker process: waiting, joining, draining, and every way to end."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline.config import QueueSettings
from pipeline.embedded import EmbeddedServer
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.streams import Entry, Streams
from tests import sample_worker
from tests.integration.processes import start_process

DEADLINE_S = 120.0
QUICK = ("worker.heartbeat_s=0.2", "worker.log_format='json'")
NOWHERE = "redis://127.0.0.1:1"
# Those that are about what an interpreter has loaded, and about how it ends.
BY_INTERPRETER = {"ends", "stubborn", "stuck", "crashes"}


class Process:
    """A sample worker and what it has said so far."""

    def __init__(self, log: Path, words: list[str], environ: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environ or {})},
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.output.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == name]

    async def until(self, condition: Callable[[], bool | Awaitable[bool]], *, deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while True:
            value = condition()
            if await value if isinstance(value, Awaitable) else value:
                return
            if time.monotonic() > end:
                raise AssertionError(f"not within {deadline_s} s; the worker said:\n{self.output}")
            await asyncio.sleep(0.02)

    async def says(self, event: str) -> dict[str, object]:
        await self.until(lambda: bool(self.events(event)))
        return self.events(event)[0]

    async def exit_code(self, *, deadline_s: float = DEADLINE_S) -> int:
        await self.until(lambda: self.code is not None, deadline_s=deadline_s)
        assert self.code is not None
        return self.code

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        if self.code is None:
            self._process.kill()
        self._process.wait()


class Fork(Process):
    """The same without the start of an interpreter."""

    def __init__(self, log: Path, words: list[str]) -> None:
        self._worker = start_process(words, log, program=sample_worker.main)

    @property
    def output(self) -> str:
        return self._worker.output

    @property
    def code(self) -> int | None:
        return self._worker.code

    def signal(self, number: signal.Signals) -> None:
        self._worker.signal(number)

    def end(self) -> None:
        if self.code is None:
            self._worker.kill()


Start = Callable[..., Process]


@pytest.fixture
def start(valkey_url: str, run_name: str, tmp_path: Path) -> Iterator[Start]:
    """Starts sample workers of this test's run; all have ended afterwards."""
    started: list[Process] = []

    def begin(body: str, *overrides: str, url: str = valkey_url) -> Process:
        settings = [
            f"run.name='{run_name}'",
            f"redis.url='{url}'",
            "worker.heartbeat_s=0.2",
            "worker.log_format='json'",
        ]
        log, words = tmp_path / f"worker-{len(started)}.log", [body, *settings, *overrides]
        is_whole = body in BY_INTERPRETER
        started.append(Process(log, ["-m", "tests.sample_worker", *words]) if is_whole else Fork(log, words))
        return started[-1]

    yield begin
    for worker in started:
        worker.end()


@pytest.fixture
def fleet(redis: Redis, keys: Keys) -> Fleet:
    return Fleet(redis, keys)


@pytest.fixture
async def streams(redis: Redis, keys: Keys) -> Streams:
    made = Streams(redis, keys, QueueSettings(), consumer="test")
    await made.open()
    return made


async def test_process_is_small_and_imports_nothing_heavy(start: Start) -> None:
    worker = start("ends")
    size = await worker.says("size")
    assert size["heavy"] == []
    assert isinstance(size["megabytes"], float)
    assert size["megabytes"] < 90


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_first_signal_drains_and_hands_back_leases(
    start: Start, fleet: Fleet, streams: Streams, number: signal.Signals
) -> None:
    await streams.feed([Entry(group_id="00000000", weight_version=0, payload=b"x")], limit=1)
    worker = start("holds_a_lease")
    assert (await worker.says("body_runs"))["leases"] == 1
    assert [seen.role for seen in await fleet.workers()] == ["scorer"]
    worker.signal(number)
    assert await worker.exit_code() == 0
    assert await fleet.workers() == []
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0.1)
    assert (lease.group_id, lease.attempt) == ("00000000", 1)


async def test_second_signal_stops_at_once(start: Start, fleet: Fleet) -> None:
    worker = start("stubborn")
    await worker.says("body_runs")
    worker.signal(signal.SIGTERM)
    await worker.says("draining")
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 128 + signal.SIGTERM
    assert await fleet.workers() == []


async def test_second_signal_ends_even_a_thread_that_never_returns(start: Start) -> None:
    worker = start("stuck")
    await worker.says("body_runs")
    worker.signal(signal.SIGTERM)
    await worker.says("draining")
    worker.signal(signal.SIGINT)
    assert await worker.exit_code() == 128 + signal.SIGINT


async def test_worker_waits_for_redis_says_so_and_starts_when_it_comes(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    with EmbeddedServer.start(folder) as server:
        url = server.url
    worker = start("idle", url=url)
    waiting = await worker.says("waiting")
    assert "Redis" in str(waiting["waiting_for"])
    assert waiting["level"] == "warning"
    with EmbeddedServer.start(folder):
        await worker.says("body_runs")
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code() == 0


async def test_signal_while_waiting_for_redis_exits_with_0(start: Start) -> None:
    worker = start("idle", url=NOWHERE)
    await worker.says("waiting")
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0


async def test_worker_outlives_an_outage_of_redis(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    server = EmbeddedServer.start(folder, persist=True)
    worker = start("idle", url=server.url)
    await worker.says("body_runs")
    server.stop()
    await worker.says("redis_away")
    with EmbeddedServer.start(folder, persist=True):
        await worker.says("redis_back")
        assert worker.events("run_lost") == []
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code() == 0


async def test_worker_says_when_redis_came_back_without_its_data(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    server = EmbeddedServer.start(folder)
    worker = start("idle", url=server.url)
    await worker.says("body_runs")
    server.stop()
    await worker.says("redis_away")
    with EmbeddedServer.start(folder):
        assert await worker.says("run_lost")
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code() == 0


async def test_restricted_user_with_a_password_works_and_the_password_is_never_shown(
    start: Start, redis: Redis, keys: Keys, run_name: str, valkey_url: str
) -> None:
    path = valkey_url.removeprefix("unix://").split("?")[0]
    await redis.execute_command("ACL", "SETUSER", run_name, "on", ">sesame", f"~{{{keys.run}}}:*", "+@all", "-@admin")
    try:
        worker = start("idle", url=f"unix://{run_name}:sesame@{path}")
        await worker.says("body_runs")
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code() == 0
        refused = start("idle", url=f"unix://{run_name}:sesami@{path}")
        assert await refused.exit_code() == 2
        assert "error: redis.url" in refused.output
        assert "sesam" not in worker.output + refused.output
    finally:
        await redis.execute_command("ACL", "DELUSER", run_name)


async def test_worker_ends_when_its_parent_is_killed(
    fleet: Fleet, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = [f"run.name='{run_name}'", f"redis.url='{valkey_url}'", "worker.log_format='json'"]
    code = (
        "import os, subprocess, sys\n"
        "environ = {**os.environ, 'ROLLSTREAM_PARENT_PID': str(os.getpid())}\n"
        "subprocess.run([sys.executable, '-m', 'tests.sample_worker', 'idle', *sys.argv[1:]], env=environ)\n"
    )
    parent = Process(tmp_path / "parent.log", ["-c", code, *settings])
    try:
        pid = int(str((await fleet_of_one(parent, fleet))["pid"]))
        parent.signal(signal.SIGKILL)
        await parent.until(lambda: not is_running(pid))
        assert await fleet.workers() == []
    finally:
        parent.end()


async def fleet_of_one(process: Process, fleet: Fleet) -> dict[str, object]:
    await process.says("body_runs")
    (worker,) = await fleet.workers()
    return {"pid": worker.pid}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_long_step_stops_neither_heartbeats_nor_scrapes(start: Start, fleet: Fleet) -> None:
    worker = start("hashes")
    await worker.says("body_runs")
    (first,) = await fleet.workers()
    for path in ("/healthz", "/readyz", "/metrics"):
        assert await asyncio.to_thread(status_of, first.address, path) == 200
    ages: list[float] = []

    async def has_beaten_often() -> bool:
        (seen,) = await fleet.workers()
        ages.append(seen.age_s)
        return sum(later < before for before, later in itertools.pairwise(ages)) >= 5

    await worker.until(has_beaten_often)
    assert worker.events("step_is_done") == [], "all of it was in one step"
    worker.signal(signal.SIGKILL)


def status_of(address: str, path: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


async def test_end_of_the_run_ends_workers_that_are_there_and_no_later_ones(start: Start, fleet: Fleet) -> None:
    old = start("idle")
    await old.says("body_runs")
    await fleet.stop("all steps are done")
    assert await old.exit_code() == 0
    assert old.events("run_is_over")[0]["reason"] == "all steps are done"
    new = start("idle")
    await new.says("body_runs")
    assert await fleet.drain("scorer") != []
    assert await new.exit_code() == 0


async def test_pause_and_resume_reach_the_body(start: Start, fleet: Fleet) -> None:
    worker = start("rests")
    await worker.says("body_runs")
    await fleet.pause()
    await worker.says("body_rests")
    await worker.until(lambda: has_state(fleet, "paused"))
    await fleet.resume()
    await worker.says("body_goes_on")
    await fleet.pause()
    await worker.until(lambda: len(worker.events("body_rests")) == 2)
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0


async def has_state(fleet: Fleet, state: str) -> bool:
    return [worker.status["state"] for worker in await fleet.workers()] == [state]


async def test_trainer_that_lost_its_lock_ends(start: Start, redis: Redis, keys: Keys) -> None:
    worker = start("trains")
    await worker.says("body_runs")
    await redis.set(keys.trainer_lock, "trainer-elsewhere")
    assert await worker.exit_code() == 1
    assert "trainer-elsewhere" in str(worker.events("worker_failed")[0]["error"])
    assert await redis.get(keys.trainer_lock) == b"trainer-elsewhere"


async def test_trainer_gives_up_its_lock_when_it_leaves(start: Start, redis: Redis, keys: Keys) -> None:
    worker = start("trains")
    await worker.says("body_runs")
    assert await redis.exists(keys.trainer_lock)
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0
    assert not await redis.exists(keys.trainer_lock)
