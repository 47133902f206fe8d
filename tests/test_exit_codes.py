"""What a worker ends with, seen from inside: the process of the test is the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

import pytest

from pipeline.config import Config, RedisSettings
from pipeline.errors import DrainTimeoutError, ServiceUnavailableError
from pipeline.fleet import Fleet, WorkerInfo
from pipeline.keys import Keys
from pipeline.settings.files import load_config
from pipeline.streams import connect
from pipeline.worker.lifecycle import WorkerContext, run_worker
from tests.sample_worker import crashes, idle, misreads, stubborn

pytestmark = pytest.mark.usefixtures("logging_as_before")
Settings = Callable[..., Config]


@pytest.fixture
def settings(valkey_url: str, run_name: str) -> Settings:
    def build(*overrides: str) -> Config:
        words = [f"run.name='{run_name}'", f"redis.url='{valkey_url}'", "worker.log_format='json'", *overrides]
        return load_config([], environ={}, overrides=words)

    return build


def registered(config: Config) -> list[WorkerInfo]:
    async def look() -> list[WorkerInfo]:
        async with connect(RedisSettings(), config.redis.url.get_secret_value()) as redis:
            return await Fleet(redis, Keys(config.run.name)).workers()

    return asyncio.run(look())


async def returns(context: WorkerContext) -> None:
    """Done at once."""
    context.set_status(seen=len(await context.fleet.workers()))


async def drains_itself_and_stays(context: WorkerContext) -> None:
    """As a worker that is told to leave and cannot."""
    os.kill(os.getpid(), signal.SIGTERM)
    await stubborn(context)


def test_done_is_0_and_leaves_the_registry(settings: Settings) -> None:
    config = settings()
    assert run_worker("scorer", config, returns) == 0
    assert registered(config) == []


def test_crash_is_1_with_a_traceback(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings()
    assert run_worker("scorer", config, crashes) == 1
    assert "ZeroDivisionError: a defect" in capsys.readouterr().err
    assert registered(config) == []


def test_mistake_of_the_user_is_2_in_one_line(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_worker("scorer", settings(), misreads) == 2
    said = capsys.readouterr().err
    assert "error: data.path = 'x.jsonl': row 3 has no column 'prompt'\n" in said
    assert "Traceback" not in said


def test_last_words_that_find_no_room_leave_the_exit_code_as_it_is(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with open(os.dup(2), "w", buffering=1) as stream:
        os.dup2(full, stream.fileno())
        os.close(full)
        monkeypatch.setattr("sys.stderr", stream)
        assert run_worker("scorer", settings(), misreads) == 2
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


@pytest.mark.parametrize(
    ("error", "code"), [(ServiceUnavailableError("nobody answers"), 3), (DrainTimeoutError("it took too long"), 4)]
)
def test_failure_on_purpose_has_its_own_code_and_no_traceback(
    settings: Settings, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    async def fails(context: WorkerContext) -> None:
        raise error

    assert run_worker("scorer", settings(), fails) == code
    said = capsys.readouterr().err
    assert str(error) in said
    assert "Traceback" not in said


def test_drain_that_takes_too_long_is_4(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings("worker.drain_timeout_s=0.2")
    assert run_worker("scorer", config, drains_itself_and_stays) == 4
    assert "worker.drain_timeout_s" in capsys.readouterr().err
    assert registered(config) == []


def test_disagreement_with_the_run_is_2_and_names_both_values(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_worker("scorer", settings("generation.group_size=8"), returns) == 0
    assert run_worker("scorer", settings("generation.group_size=4"), returns) == 2
    assert "generation.group_size = 4 here, 8 in the run" in capsys.readouterr().err


def test_embedded_server_is_2_for_a_single_worker(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_worker("scorer", settings("redis.url='embedded'"), idle) == 2
    assert "rollstream up" in capsys.readouterr().err


def test_port_in_use_is_2_and_names_the_setting(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_worker("scorer", settings(f"worker.port={port}"), idle) == 2
    assert f"error: worker.port = {port}" in capsys.readouterr().err


def test_exporter_watches_a_run_whose_settings_differ(settings: Settings) -> None:
    assert run_worker("scorer", settings("generation.group_size=8"), returns) == 0
    assert run_worker("exporter", settings("generation.group_size=4"), returns, joins=False) == 0


def test_signals_are_as_before_when_the_worker_has_ended(settings: Settings) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert run_worker("scorer", settings(), returns) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
