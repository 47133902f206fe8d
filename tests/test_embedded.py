"""The embedded server lives as long as its parent, serves other processes, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from pipeline.embedded import LOG_NAME, EmbeddedServer, find_server
from pipeline.errors import ConfigError, ServiceUnavailableError

PARENT = """
import sys
from pathlib import Path
from pipeline import embedded
embedded.STOP_TIMEOUT_S = 1
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
server = embedded.EmbeddedServer.start(folder, persist=folder is not None)
print(server.url, flush=True)
sys.stdin.read()
"""


def until(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, protocol=2)


def test_other_processes_connect_by_url_and_stopping_removes_everything() -> None:
    with EmbeddedServer.start() as server:
        folder = server.socket_path.parent
        assert server.is_running()
        with client(server.url) as other:
            assert other.set("key", "value")
            assert other.info("server")["tcp_port"] == 0
        assert oct(server.socket_path.stat().st_mode & 0o777) == "0o700"
    assert not server.is_running()
    assert not folder.exists()
    server.stop()


@contextmanager
def killed_parent(*arguments: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a server whose parent is killed at the end of the block."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().decode().strip()
        with client(url) as other:
            yield url, int(other.info("server")["process_id"])
        parent.send_signal(signal.SIGKILL)


def refuse_to_stop(url: str, pid: int, folder: Path) -> None:
    """Have the server save when it stops, and fail: it cannot write its file where a folder of that name is."""
    with client(url) as other:
        other.set("key", "value")
        other.config_set("save", "3600 1")
    (folder / f"temp-{pid}.rdb").mkdir()


def test_the_server_ends_when_its_parent_is_killed() -> None:
    with killed_parent() as (url, pid):
        path = Path(url.removeprefix("unix://"))
    until(lambda: not is_alive(pid))
    until(lambda: not path.parent.exists())


def test_a_server_that_refuses_to_stop_ends_with_its_parent_too() -> None:
    with killed_parent() as (url, pid):
        folder = Path(url.removeprefix("unix://")).parent
        refuse_to_stop(url, pid, folder)
    until(lambda: not is_alive(pid))
    until(lambda: not folder.exists())


def test_what_a_server_that_refuses_to_stop_had_answered_is_there_after_a_restart(tmp_path: Path) -> None:
    with killed_parent(str(tmp_path)) as (url, pid):
        refuse_to_stop(url, pid, tmp_path)
    until(lambda: not is_alive(pid))
    assert "can't exit" in (tmp_path / LOG_NAME).read_text()
    with EmbeddedServer.start(tmp_path, persist=True) as again, client(again.url) as other:
        assert other.get("key") == b"value"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_server_whose_keeper_does_not_answer_either_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.embedded.STOP_TIMEOUT_S", 0)
    monkeypatch.setattr("pipeline.embedded._KEEPER_TIMEOUT_S", 0.2)
    with EmbeddedServer.start() as server, client(server.url) as other:
        pid = int(other.info("server")["process_id"])
        os.killpg(os.getpgid(pid), signal.SIGSTOP)
        server.stop()
    until(lambda: not is_alive(pid))


def test_an_interrupt_of_the_terminal_does_not_reach_the_server() -> None:
    with EmbeddedServer.start() as server, client(server.url) as other:
        pid = int(other.info("server")["process_id"])
        assert os.getpgid(pid) != os.getpgid(0)


def test_what_persists_is_there_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path, persist=True) as first, client(first.url) as one:
        one.set("key", "value")
    with EmbeddedServer.start(tmp_path, persist=True) as second, client(second.url) as two:
        assert second.url == first.url
        assert two.get("key") == b"value"
        with pytest.raises(ConfigError, match="already runs"):
            EmbeddedServer.start(tmp_path, persist=True)
    assert tmp_path.exists()


def test_a_server_whose_data_is_damaged_says_so_and_what_to_do(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path, persist=True) as first, client(first.url) as one:
        one.set("key", "value")
    (data,) = tmp_path.glob("appendonlydir/*.incr.aof")
    with data.open("ab") as file:
        file.write(bytes(64))
    with pytest.raises(ServiceUnavailableError, match=r"Bad file format.*move .*/appendonlydir away"):
        EmbeddedServer.start(tmp_path, persist=True)
    data.parent.rename(tmp_path / "away")
    with EmbeddedServer.start(tmp_path, persist=True) as again:
        assert again.is_running()


def test_a_server_that_does_not_answer_has_its_folder_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.embedded._PREDECESSOR_TIMEOUT_S", 0.0)
    with EmbeddedServer.start(tmp_path, persist=True) as server, client(server.url) as one:
        pid = int(one.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ConfigError, match=r"already runs.*ends within 20 s"):
            EmbeddedServer.start(tmp_path, persist=True)
        os.kill(pid, signal.SIGCONT)
        assert one.set("key", "value")


def test_persisting_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="needs a folder"):
        EmbeddedServer.start(persist=True)


def test_a_folder_whose_path_no_socket_may_have_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    with EmbeddedServer.start(folder, persist=True) as first, client(first.url) as one:
        place = first.socket_path.parent
        assert (folder in place.parents, oct(place.stat().st_mode & 0o777)) == (False, "0o700")
        one.set("key", "value")
        with pytest.raises(ConfigError, match="already runs"):
            EmbeddedServer.start(folder, persist=True)
    assert not place.exists()
    with EmbeddedServer.start(folder, persist=True) as second, client(second.url) as two:
        assert two.get("key") == b"value"
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    with pytest.raises(ConfigError, match="somebody else"):
        EmbeddedServer.start(folder, persist=True)
    place.rmdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ConfigError, match="choose a folder with a shorter path"):
        EmbeddedServer.start(folder, persist=True)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(ServiceUnavailableError, match="did not start"):
        EmbeddedServer.start(binary=program)


def test_the_wheels_server_is_found() -> None:
    assert find_server().is_file()
