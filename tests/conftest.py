"""Servers, clients and run names for all tests.

One Valkey server serves the whole session, on a unix socket; each test has a run of its own in it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import structlog
from redis.asyncio import Redis

from pipeline import startup
from pipeline.cli import run
from pipeline.config import RedisSettings
from pipeline.embedded import EmbeddedServer
from pipeline.keys import Keys
from pipeline.streams import connect
from tests.integration.processes import share_forks

# Where tests are that take seconds. They come first, so that at the end nobody works alone.
LONG = (
    "tests/ranks/test_two_ranks.py",
    "tests/integration/test_ranks.py",
    "tests/vllm/",
    "tests/chaos/",
    "tests/test_overlap_benchmarks.py",
    "tests/deploy/test_watching.py",
    "tests/integration/",
    "tests/weights/test_weights_benchmark.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts what runs in the background deaf to SIGINT, and processes of the tests would inherit that.

    How long one example of hypothesis takes says something of the machine, and nothing of the code.
    """
    hypothesis.settings.register_profile("any machine", deadline=None)
    hypothesis.settings.load_profile("any machine")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):  # it hands the tests out to others
        share_forks()
    startup.begin()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Test modules are imported, and with them torch: models as small as theirs only lose by sharing their work out."""
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        return (yield)


def pytest_collection_finish() -> None:
    """All test modules have been imported."""
    startup.settle()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, and otherwise in their order."""
    ranks = {place: rank for rank, place in enumerate(LONG)}
    items.sort(key=lambda item: next((ranks[place] for place in LONG if item.nodeid.startswith(place)), len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests go one by one to whoever is free, but those of a module that share something made once stay together.

    Those of vLLM share an engine, and runs with it the memory.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def shares(module: str) -> bool:
        return 'scope="module"' in (config.rootpath / module).read_text(encoding="utf-8")

    class Scheduling(LoadScopeScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            """Every other worker begins at the end: while some wait for processes, others compute."""
            if self.nodes.index(node) % 2:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/vllm/"):
                return "tests/vllm"
            module = nodeid.partition("::")[0]
            return module if shares(module) or module.endswith("test_vllm_run.py") else nodeid

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """URL of the session's Valkey server."""
    with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture(scope="session")
def debian_redis_url() -> Iterator[str]:
    """URL of the session's Redis server, from the program on PATH; skips where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with EmbeddedServer.start(binary=Path(program)) as server:
        yield server.url


@pytest.fixture(params=["valkey", "redis"])
def redis_url(request: pytest.FixtureRequest) -> str:
    """URL of a server of each kind, for tests of what we ask of Redis."""
    name = {"valkey": "valkey_url", "redis": "debian_redis_url"}[request.param]
    return str(request.getfixturevalue(name))


@pytest.fixture
def run_name() -> str:
    """Name of a run that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def keys(run_name: str) -> Keys:
    """Keys of this test's run."""
    return Keys(run_name)


@pytest.fixture
async def redis(valkey_url: str, keys: Keys) -> AsyncIterator[Redis]:
    """A client of the session's Valkey; the run's keys are removed afterwards."""
    client = connect(RedisSettings(), valkey_url)
    yield client
    async for key in client.scan_iter(match=keys.pattern.encode()):
        await client.delete(key)
    await client.aclose()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for a server's socket; the path of tmp_path may be too long for one."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Undoes what a test does to the process's logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@dataclass(frozen=True, slots=True)
class Answer:
    """Exit code and output of one command line."""

    code: int
    out: str
    err: str


@pytest.fixture
def ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, valkey_url: str, run_name: str
) -> Callable[..., Answer]:
    """Calls the command line for this test's run, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    monkeypatch.setenv("ROLLSTREAM_RUN__NAME", run_name)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = run(words)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call
