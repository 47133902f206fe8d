"""What the documentation says can be done: commands parse, links lead somewhere, settings exist."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from pipeline.cli import cli
from pipeline.settings.files import load_config
from pipeline.settings.reference import sections, settings

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("deploy/**/*.md")]
)
# Programs that are not ours, or that a test would have to install something for.
OTHERS = {
    "cd",
    "mkdir",
    "source",
    "git",
    "pip",
    "apt-get",
    "curl",
    "export",
    "redis-cli",
    "redis-server",
    "valkey-server",
    "docker",
    "hf",
    "kubectl",
    "sbatch",
    "scancel",
    "kind",
    "env",
    "systemctl",
    "journalctl",
    "useradd",
    "install",
    "prometheus",
    "promtool",
    "grafana",
    "vllm",
    "torchrun",
}
_FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
_QUOTED = re.compile(r"`(?P<path>[a-z_]+(?:\.[a-z_]+)+)(?:\s*=[^`]*)?`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, kind: str) -> list[str]:
    return [match["body"] for match in _FENCE.finditer(page.read_text(encoding="utf-8")) if match["kind"] == kind]


def commands(page: Path) -> list[str]:
    """Lines after a `$ ` prompt, with lines that a backslash continues."""
    joined = (body.replace("\\\n", " ") for body in blocks(page, "console"))
    return [line[2:].partition(" #")[0].strip() for body in joined for line in body.splitlines() if line[:2] == "$ "]


ALL_COMMANDS = [pytest.param(line, id=f"{name_of(page)}: {line}") for page in PAGES for line in commands(page)]
ALL_TOML = [pytest.param(page, text, id=name_of(page)) for page in PAGES for text in blocks(page, "toml")]


def parse_rollstream(words: list[str]) -> None:
    """Walk down to the command and let it parse its words, without running it."""
    group: click.Command = cli
    context = None
    while isinstance(group, click.Group):
        context = group.make_context(words[0] if words else "rollstream", words, parent=context)
        name, command, words = group.resolve_command(context, [*context._protected_args, *context.args])
        if command is None or name is None:
            raise click.UsageError(f"no command in {words}")
        group = command
        if not isinstance(command, click.Group):
            command.make_context(name, words, parent=context)
            return
        if not words or words[0].startswith("-"):
            return


def check(words: list[str]) -> None:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *rest = words
    match program.rpartition("/")[2]:
        case "rollstream":
            with contextlib.suppress(click.exceptions.Exit):  # --help and --version
                parse_rollstream(rest)
        case "make":
            quick = ["MADE_WITH=", "INSTALLED="]  # what is slow to compute and of no interest here
            subprocess.run(["make", "-n", *rest, *quick], cwd=ROOT, check=True, capture_output=True)
        case "python" | "python3":
            assert rest[0] in {"-m", "-c"} or (ROOT / rest[0]).is_file(), f"{rest[0]} is not there"
            assert rest[0] != "-m" or find_spec(rest[1]) is not None, f"there is no module {rest[1]}"
        case "pytest" | "ruff" | "mypy" | "lint-imports" | "pre-commit":
            assert not program.startswith("/")
        case script if script.endswith(".sh"):
            assert (ROOT / program).is_file(), f"{program} is not there"
        case other:
            assert other in OTHERS, f"no test knows `{other}`"


@pytest.mark.parametrize("line", ALL_COMMANDS)
def test_a_command_in_the_documentation_can_be_given(line: str) -> None:
    for part in re.split(r"\s(?:&&|\||;)\s|\s&$", line):
        check(shlex.split(part))


def test_the_demo_is_said_to_take_as_long_everywhere() -> None:
    said = "about a minute"
    assert said in (cli.commands["demo"].help or "")
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_command_that_is_wrong_is_found() -> None:
    for line in ("rollstream upp", "rollstream up --generatorz 2", "make no-such-target", "no-such-program"):
        with pytest.raises((click.UsageError, subprocess.CalledProcessError, AssertionError)):
            check(shlex.split(line))


@pytest.mark.parametrize(("page", "text"), ALL_TOML)
def test_settings_in_the_documentation_load(page: Path, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"{page.stem}.toml"
    file.write_text(text, encoding="utf-8")
    load_config([file], environ={})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        target = match["target"]
        assert "://" in target or (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_are_named_exist(page: Path) -> None:
    known = {*settings(), *sections()}
    for match in _QUOTED.finditer(page.read_text(encoding="utf-8")):
        section, key = match["path"].split(".")[0], match["path"].split(".")[-1]
        is_file = key in {"py", "md", "toml", "jsonl", "lua", "json", "png", "sock", "log"}
        if section in sections() and not is_file:
            assert match["path"] in known, f"{name_of(page)} names the setting {match['path']}"


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/**/*.toml")), ids=name_of)
def test_settings_of_an_example_load(example: Path) -> None:
    load_config([example], environ={})
