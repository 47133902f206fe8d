"""`rollstream keys`: secrets stay in their files."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import run
from pipeline.config import WeightSettings
from pipeline.errors import ConfigError
from pipeline.weights.security import Signer, load_keys


def test_a_new_key_is_its_owners_alone_and_what_is_printed_fits_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.key"
    assert run(["keys", "new", str(file)]) == 0
    printed = capsys.readouterr().out
    loaded = load_keys("server_secret_key_file", str(file))
    assert loaded is not None
    assert f"public key: {loaded.public}\n" in printed
    assert loaded.secret.decode() not in printed
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run(["keys", "show", str(file)]) == 0
    assert capsys.readouterr().out == f"{loaded.public}\n"


def test_a_shared_key_signs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shared.key"
    assert run(["keys", "new", str(file), "--shared"]) == 0
    Signer.load(WeightSettings(shared_key_file=str(file)).shared_key_file)
    assert file.read_text().strip() not in capsys.readouterr().out


def test_a_key_that_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.key"
    file.write_text("in use")
    assert run(["keys", "new", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == "in use"


@pytest.mark.parametrize("name", ["missing/weights.key", "empty"])
def test_a_file_that_cannot_be_used_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    assert run(["keys", "show", str(tmp_path / name)]) == 2
    assert run(["keys", "new", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count(name) >= 2


@pytest.mark.parametrize("words", [[], ["--shared"]])
def test_a_key_that_cannot_be_written_leaves_no_file(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "weights.key"
    command = [sys.executable, "-m", "pipeline.cli", "keys", "new", str(file), *words]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *command], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"{file} cannot be written: File too large" in done.stderr
    assert not file.exists()


@pytest.mark.parametrize("endless", ["/dev/zero", "/dev/full"])
def test_no_more_is_read_than_a_key_has(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "show", endless]) == 2
    assert f"{endless} is no file of a key" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"weights\.shared_key_file.*is no file of a key"):
        Signer.load(endless)
