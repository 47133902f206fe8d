"""All of deploy/: settings, commands and scripts that are named there exist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.settings.reference import settings
from tests.deploy.files import DEPLOY, ROOT, check_command, commands, texts, variables

SCRIPTS = [path for path, text in texts() if text.startswith("#!") or path.suffix == ".sh"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def program(name: str) -> str:
    """A tool of the extra `dev`, beside this interpreter or on PATH; skips where there is none for this platform."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize(("path", "text"), [pytest.param(*item, id=name_of(item[0])) for item in texts()])
def test_settings_and_commands_that_a_file_names_exist(path: Path, text: str) -> None:
    known = {f"ROLLSTREAM_{name.upper().replace('.', '__')}" for name in settings()}
    assert variables(text) <= known, name_of(path)
    for words in commands(text):
        check_command([word for word in words if word not in {'"$@"', "$@"}])


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_are_sound_and_can_be_started(path: Path) -> None:
    done = subprocess.run([program("shellcheck"), path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert path.stat().st_mode & 0o111 or path.suffix == ".sbatch"


def test_every_way_has_a_section_of_its_own() -> None:
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    ways = {path.name for path in DEPLOY.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {way for way in ways if f"({way}/" not in page and f"deploy/{way}/" not in page} == set()
