"""What `up` makes around its workers: directory, settings, server, divided cores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.local.crew import Crew, worker_specs
from pipeline.local.run import LocalRun
from pipeline.local.server_address import find_server, with_server
from pipeline.settings.files import load_config

PRINTS = "import os, sys; print(sys.argv[1:], os.environ.get('REDIS_URL'), os.environ.get('OMP_NUM_THREADS'))"


def config_in(tmp_path: Path, *overrides: str, url: str = "embedded") -> Config:
    return load_config([], environ={"REDIS_URL": url}, overrides=[f"run.dir='{tmp_path}'", *overrides])


async def test_workers_get_their_role_the_settings_and_the_server(tmp_path: Path) -> None:
    lines: dict[str, str] = {}
    config = config_in(tmp_path, "worker.port=4000", "trainer.num_threads=3")
    with LocalRun(config, Crew(num_generators=2), persist=False, command=(sys.executable, "-c", PRINTS)) as run:
        url = run.config.redis.url.get_secret_value()
        assert await run.supervisor(lines.__setitem__).run() == 0
        written = load_config([run.config_file], environ={})
    assert written.redis.url.get_secret_value() == "embedded", "the server's address ends with it"
    assert list(run.names) == ["generator-1", "generator-2", "scorer-1", "trainer", "exporter"]
    assert url.startswith("unix://")
    assert lines["trainer"].startswith(f"['trainer', '-c', '{run.config_file}'] {url}")
    assert (written.worker.port, written.worker.log_format) == (0, "console"), "no two workers want the same port"
    assert written.trainer.num_threads == 3
    assert written.redis.url.get_secret_value() == "embedded", "the file serves for another run"


def test_the_server_is_found_while_the_run_lasts_and_gone_after_it(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with LocalRun(config, Crew(), persist=False) as run:
        url = find_server(config.run_dir)
        assert url == run.config.redis.url.get_secret_value()
        assert with_server(config).redis.url.get_secret_value() == url
    assert find_server(config.run_dir) is None
    with pytest.raises(ConfigError, match="rollstream up"):
        with_server(config)


def test_a_server_of_ones_own_is_used_and_its_password_is_not_written_down(tmp_path: Path) -> None:
    url = "redis://user:hunter2@host:1"
    config = config_in(tmp_path, url=url)
    with LocalRun(config, Crew()) as run:
        assert run.config.redis.url.get_secret_value() == url
        assert not (run.config.run_dir / "server.json").exists()
        for file in run.config.run_dir.rglob("*"):
            assert "hunter2" not in file.read_text()
    specs = worker_specs(config, Crew(), ("x",), Path("c"), {})
    assert all(spec.environ["REDIS_URL"] == url for spec in specs)
    assert all("hunter2" not in " ".join(spec.argv) for spec in specs)


def test_one_run_has_one_up(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with LocalRun(config, Crew(), persist=False):
        with pytest.raises(ConfigError, match="--run"), LocalRun(config, Crew(), persist=False):
            pass
        with LocalRun(config_in(tmp_path, "run.name=other"), Crew(), persist=False):
            pass
    with LocalRun(config, Crew(), persist=False):
        pass


def test_settings_of_the_environment_are_resolved_once(tmp_path: Path) -> None:
    environ = {"ROLLSTREAM_TRAINER__MAX_STEPS": "3", "ROLLSTREAM_PORT": "kept", "HOME": "kept"}
    specs = worker_specs(config_in(tmp_path), Crew(), ("x",), Path("c"), environ)
    assert all(spec.unset == ("ROLLSTREAM_TRAINER__MAX_STEPS",) for spec in specs)


def test_threads_are_divided_unless_the_user_or_a_setting_has_chosen(tmp_path: Path) -> None:
    def threads(config: Config, environ: dict[str, str]) -> dict[str, str | None]:
        specs = worker_specs(config, Crew(num_generators=1), ("x",), Path("c"), environ)
        return {spec.name: spec.environ.get("OMP_NUM_THREADS") for spec in specs}

    divided = threads(config_in(tmp_path), {})
    assert divided["generator-1"] == divided["trainer"]
    assert (divided["scorer-1"], divided["exporter"]) == ("1", "1")
    assert set(threads(config_in(tmp_path), {"OMP_NUM_THREADS": "7"}).values()) == {None}
    assert threads(config_in(tmp_path, "trainer.num_threads=2"), {})["trainer"] is None
