"""Units for systemd: systemd accepts them, and they fit the real command line, settings and users."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from deploy.redis.users import USERS
from pipeline.config import Config
from pipeline.settings.files import load_config
from tests.deploy.files import DEPLOY, LEAVE_S, check_command
from tests.deploy.servers import make_users, on_socket, serving

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
WORKERS = [unit for unit in UNITS if unit.stem != "rollstream-queue"]
_MOST_EXPOSED = 2.5  # of 10, as systemd-analyze counts; what it calls OK


def name_of(unit: Path) -> str:
    return unit.stem


def role_of(unit: Path) -> str:
    return unit.stem.removeprefix("rollstream-").rstrip("@")


def values(unit: Path, key: str) -> list[str]:
    """What a unit says under a key, in every line that has it."""
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with programs and pages that are there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    ours = str(Path(sys.executable).with_name("rollstream"))
    for unit in (DEPLOY / "systemd").iterdir():
        text = unit.read_text().replace("/opt/rollstream/.venv/bin/rollstream", ours)
        text = text.replace("/usr/bin/redis-server", sys.executable).replace("file:///opt/rollstream/", "file:///")
        (tmp_path / unit.name).write_text(text)
    return tmp_path


def test_systemd_accepts_the_units(units: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", *sorted(units.iterdir())], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "rollstream" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=name_of)
def test_units_expose_little(units: Path, unit: Path) -> None:
    words = ["systemd-analyze", "security", "--offline=true", str(units / unit.name)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    (level,) = re.findall(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert float(level) <= _MOST_EXPOSED


@pytest.mark.parametrize("unit", WORKERS, ids=name_of)
def test_a_unit_starts_its_worker_as_its_user_and_lets_it_drain(unit: Path) -> None:
    role = role_of(unit)
    (start,) = values(unit, "ExecStart")
    program, *words = shlex.split(start)
    assert (program, words[0]) == ("/opt/rollstream/.venv/bin/rollstream", role)
    check_command(words)
    own, *optional = values(unit, "EnvironmentFile")
    assert own == f"/etc/rollstream/users/{role}.env"
    assert optional == (["-/etc/rollstream/models.env"] if role in {"teacher", "judge"} else [])
    assert role in USERS
    (stop_s,) = values(unit, "TimeoutStopSec")
    assert float(stop_s) >= Config().worker.drain_timeout_s + LEAVE_S
    assert values(unit, "RestartPreventExitStatus") == ["2"]
    environ = dict(item.split("=", 1) for line in values(unit, "Environment") for item in line.split())
    load_config([], environ=environ)


def test_the_exporter_is_where_prometheus_looks() -> None:
    (unit,) = [unit for unit in UNITS if role_of(unit) == "exporter"]
    port = dict(item.split("=", 1) for line in values(unit, "Environment") for item in line.split())
    address = f"http://127.0.0.1:{port['ROLLSTREAM_EXPORTER__PORT']}/targets"
    assert address in (DEPLOY / "prometheus" / "prometheus.yml").read_text()


def test_the_server_starts_as_its_unit_has_it(short_path: Path) -> None:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    (unit,) = [unit for unit in UNITS if role_of(unit) == "queue"]
    _, conf, *words = shlex.split(values(unit, "ExecStart")[0])
    assert (DEPLOY / "redis" / Path(conf).name).is_file()
    users = make_users(short_path / "users", "my-run")
    path = short_path / "server.sock"
    here = words[: words.index("--dir")]
    with serving(program, short_path, users, *here, *on_socket(path), url=users.on_socket("operator", path)):
        pass


def test_all_units_belong_to_the_target() -> None:
    for unit in UNITS:
        parser = RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[method-assign, assignment]
        parser.read(unit)
        assert parser["Install"]["WantedBy"] == "rollstream.target"
