"""Commands and the server they need: which one, what it refuses, and a run that it does not know."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from redis.asyncio import Redis

from pipeline.checks.doctor import examine
from pipeline.checks.findings import Level
from pipeline.config import QueueSettings, RedisSettings
from pipeline.embedded import EmbeddedServer
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.local.server_address import find_server
from pipeline.queues.leases import Entry
from pipeline.settings.files import load_config
from pipeline.streams import Streams, connect
from tests.conftest import Answer

Ask = Callable[..., Answer]
R = TypeVar("R")
LOOKING = [("status",), ("workers",), ("streams",), ("streams", "peek", "prompts"), ("pause",), ("reset", "--yes")]


def on(url: str, body: Callable[[Redis], Awaitable[R]]) -> R:
    """What `body` returns with a client of the server at `url`."""

    async def connected() -> R:
        async with connect(RedisSettings(), url) as redis:
            return await body(redis)

    return asyncio.run(connected())


@pytest.fixture
def locked_url() -> Iterator[str]:
    """URL, without a password, of a server that wants one."""
    with EmbeddedServer.start() as server:
        on(server.url, lambda redis: redis.execute_command("CONFIG", "SET", "requirepass", "sesame"))
        yield server.url


def kept_run(run_dir: Path, keys: Keys) -> None:
    """What an `up` of this run has left: one group that died, and nobody there."""

    async def leave(redis: Redis) -> None:
        await Fleet(redis, keys).join({"lora.rank": "0"})
        streams = Streams(redis, keys, QueueSettings(), consumer="test")
        await streams.open()
        await streams.feed([Entry(group_id="00000000", weight_version=0, payload=b"x", ordinal=0)], limit=1)
        (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=1.0)
        await streams.dead_letter(lease, "broken on purpose")

    with EmbeddedServer.start(run_dir / "redis", persist=True) as server:
        on(server.url, leave)


@pytest.fixture
def run_dir(ask: Ask, monkeypatch: pytest.MonkeyPatch, short_path: Path, run_name: str) -> Path:
    """The directory of a run whose server is its own and has ended with its `up`."""
    monkeypatch.delenv("REDIS_URL")
    monkeypatch.setenv("ROLLSTREAM_RUN__DIR", str(short_path))
    kept_run(short_path / run_name, Keys(run_name))
    return short_path / run_name


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
@pytest.mark.parametrize("user", ["", ":hunter2@", "nobody:hunter2@"], ids=["none", "password", "user"])
def test_a_server_that_refuses_us_is_not_said_to_be_silent(
    ask: Ask, locked_url: str, user: str, words: tuple[str, ...]
) -> None:
    answer = ask(*words, "--set", f"redis.url={locked_url.replace('unix://', f'unix://{user}')}")
    assert answer.code == 2
    assert answer.err.startswith("error: redis.url = unix://")
    assert "the server does not let us in" in answer.err
    assert "mend the user, its password or its rights" in answer.err
    assert "hunter2" not in answer.err


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_a_database_that_does_not_exist_is_named(ask: Ask, valkey_url: str, words: tuple[str, ...]) -> None:
    answer = ask(*words, "--set", f"redis.url={valkey_url}?db=99")
    assert answer.code == 2
    assert "db=99: the server has no such database" in answer.err


@pytest.mark.parametrize("url", ["redis://host/abc", "rediss://host:1/0/1", "unix:///s.sock?db=x", "redis://host/-1"])
def test_a_database_that_is_no_number_is_refused_before_anything_is_asked(ask: Ask, url: str) -> None:
    answer = ask("status", "--set", f"redis.url={url}")
    assert answer.code == 2
    assert answer.err.startswith(f'error: redis.url = "{url}": ')
    assert "what it names is not the number of a database" in answer.err


@pytest.mark.parametrize("url", ["redis://host:port/0", "redis://host:1/0?no_such_option=1"])
def test_a_url_that_cannot_be_one_is_refused(ask: Ask, url: str) -> None:
    answer = ask("status", "--set", f"redis.url={url}")
    assert (answer.code, answer.err[:17]) == (2, "error: redis.url ")


def test_doctor_says_that_the_server_refuses_us(locked_url: str, tmp_path: Path) -> None:
    for url in (locked_url, f"{locked_url}?db=99", f"{locked_url}?no_such_option=1"):
        findings = examine(load_config([], environ={"REDIS_URL": url}, overrides=[f"run.dir='{tmp_path}'"]))
        (finding,) = [finding for finding in findings if finding.subject == "redis"]
        assert finding.level is Level.ERROR
        assert finding.way_out
    findings = examine(load_config([], environ={"REDIS_URL": locked_url}, overrides=[f"run.dir='{tmp_path}'"]))
    (finding,) = [finding for finding in findings if finding.subject == "redis"]
    assert "does not let us in" in finding.text


async def test_a_person_does_not_wait_for_a_server_that_takes_no_writes(ask: Ask, keys: Keys) -> None:
    with EmbeddedServer.start() as server:
        async with connect(RedisSettings(), server.url) as redis:
            await Fleet(redis, keys).join({"lora.rank": "0"})
            await redis.config_set("maxmemory", "1")
            answer = await asyncio.to_thread(ask, "pause", "--set", f"redis.url={server.url}")
    assert answer.code == 3
    assert "the server does not take this now" in answer.err


@pytest.mark.parametrize(
    "words", [("pause",), ("resume",), ("drain", "generator"), ("streams", "requeue", "1-0")], ids=" ".join
)
async def test_a_run_that_does_not_exist_is_refused_with_those_that_do_and_nothing_is_written(
    ask: Ask, redis: Redis, keys: Keys, words: tuple[str, ...]
) -> None:
    other = Keys(f"{keys.run}-other")
    await Fleet(redis, other).join({"lora.rank": "0"})
    before = {key async for key in redis.scan_iter(match=keys.pattern.encode())}
    answer = await asyncio.to_thread(ask, *words)
    assert answer.code == 2
    assert answer.err.startswith(f"error: run.name = {keys.run!r}: the server knows no such run (runs there: ")
    assert {key async for key in redis.scan_iter(match=keys.pattern.encode())} == before == set()
    await redis.delete(other.meta)
    with EmbeddedServer.start() as server:
        async with connect(RedisSettings(), server.url) as alone:
            await Fleet(alone, other).join({"lora.rank": "0"})
        answer = await asyncio.to_thread(ask, *words, "--set", f"redis.url={server.url}")
    assert f"(runs there: {other.run})" in answer.err


async def test_the_status_of_a_run_that_does_not_exist_names_those_that_do(keys: Keys, ask: Ask) -> None:
    with EmbeddedServer.start() as server:
        on_server = ("--set", f"redis.url={server.url}")
        assert (
            "nobody has joined this run (runs there: none)" in (await asyncio.to_thread(ask, "status", *on_server)).out
        )
        async with connect(RedisSettings(), server.url) as redis:
            await Fleet(redis, Keys("vowels")).join({"lora.rank": "0"})
        said = (await asyncio.to_thread(ask, "status", *on_server)).out
    assert "nobody has joined this run (runs there: vowels)" in said


def test_reset_reaches_a_run_whose_own_server_has_ended(ask: Ask, run_dir: Path, run_name: str) -> None:
    answer = ask("reset", "--yes")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("removed ")
    assert f"keys of run {run_name!r}" in answer.out
    assert find_server(run_dir) is None, "the server has ended with the command"
    assert ask("reset", "--yes").out.startswith("removed 0 keys"), "and what it removed stays removed"


def test_streams_show_what_an_up_that_has_ended_left(ask: Ask, run_dir: Path) -> None:
    assert "dead 1" in ask("streams").out
    assert "broken on purpose" in ask("streams", "dead-letters").out
    assert ask("streams", "requeue", "--all").out == "1 put back\n"
    assert "dead 0 + live 1" in ask("streams").out


@pytest.mark.parametrize("words", [("status",), ("workers",), ("pause",), ("scorer",)], ids=" ".join)
def test_without_its_server_a_command_says_the_whole_one_that_helps(
    ask: Ask, run_dir: Path, run_name: str, words: tuple[str, ...]
) -> None:
    Path("a b.toml").write_text("")
    answer = ask(*words, "-c", "a b.toml", "--run", run_name, "--set", "redis.url=embedded")
    assert answer.code == 2
    options = f"-c 'a b.toml' --run {run_name}"
    assert f"`rollstream up {options}`" in answer.err
    assert f"`rollstream streams {options}` shows what it has kept" in answer.err


def test_a_run_that_nobody_started_has_nothing_to_reset(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL")
    answer = ask("reset", "--yes")
    assert answer.code == 2
    assert "`rollstream up`" in answer.err


def test_while_an_up_begins_its_data_is_left_alone(ask: Ask, run_dir: Path) -> None:
    with (run_dir / "up.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = ask("reset", "--yes")
    assert answer.code == 2
    assert "another `up` of this run is at work" in answer.err
