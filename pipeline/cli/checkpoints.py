"""Commands for what is on disk: list, verify, export.

In: a run's directory. Out: tables, verdicts, a copy of a policy. They need no server and change no run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Sources, as_json, takes_config
from pipeline.cli.output import echo_json, echo_table
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.checkpoints import Checkpoint, Checkpoints

_FOLDER = click.Path(path_type=Path)


@click.group()
def checkpoints() -> None:
    """Show what is on disk, hold it against its hashes, take a policy out of it."""


@checkpoints.command("list")
@takes_config
@as_json
def list_checkpoints(sources: Sources, is_json: bool) -> int:
    """List the complete checkpoints of a run, oldest first."""
    found = _of(sources).list()
    if is_json:
        echo_json(found)
        return 0
    rows = [(item.step, f"{item.num_bytes / 1e6:.1f}", item.path) for item in found]
    echo_table(("step", "MB", "path"), rows, nothing="no complete checkpoint")
    return 0


@checkpoints.command("verify")
@click.argument("which", default="all", metavar="[STEP|DIRECTORY|latest|all]")
@takes_config
def verify(sources: Sources, which: str) -> int:
    """Read every file of a checkpoint and compare it with the hash that was written with it."""
    from pipeline.errors import CheckpointError

    there = _of(sources)
    chosen = there.list() if which == "all" else [_find(there, which)]
    damaged = there.damaged() if which == "all" else []
    num_bad = len(damaged)
    for item in chosen:
        try:
            click.echo(f"step {item.step}: {item.verify()} files are as they were written")
        except CheckpointError as error:
            num_bad += 1
            click.echo(f"step {item.step}: {error}", err=True)
    for path in damaged:
        click.echo(
            f"{path} is no complete checkpoint: a file is missing, or has not the size that was written", err=True
        )
    if not chosen:
        click.echo("no complete checkpoint")
    return 1 if num_bad else 0


@checkpoints.command("export")
@click.argument("which", metavar="STEP|DIRECTORY|latest")
@click.argument("target", type=_FOLDER)
@takes_config
def export(sources: Sources, which: str, target: Path) -> int:
    """Copy the policy of a checkpoint to a directory that other programs load."""
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} is there already and is not an empty directory: choose another")
        item = _find(_of(sources), which)
        item.verify()
        shutil.copytree(item.model_dir, target, dirs_exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {_reason(error)}; choose another place") from error
    click.echo(f"step {item.step}: {target}")
    return 0


def _reason(error: OSError) -> str:
    """shutil gathers what became of several files: (from, to, why)."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        return "; ".join(str(why) for _, _, why in error.args[0][:1])
    return error.strerror or str(error)


def _of(sources: Sources) -> Checkpoints:
    from pipeline.checkpoints import Checkpoints

    config = sources.load()
    return Checkpoints(config.run_dir / "checkpoints", config.checkpoint)


def _find(there: Checkpoints, which: str) -> Checkpoint:
    from pipeline.errors import CheckpointError

    try:
        return there.find(which)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
