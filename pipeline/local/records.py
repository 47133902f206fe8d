"""The directory of a run that is removed: what it means for the next run of its name, and out of its way.

In: settings. Out: a sentence for the person who removes the run. Nothing in a directory is ever deleted.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.local.run import alone_in
from pipeline.run.resumption import run_checkpoints


def what_stays(config: Config) -> str:
    """What a new run of this name finds."""
    newest = run_checkpoints(config).latest()
    if newest is None:
        return f"its directory {config.run_dir} stays" if config.run_dir.exists() else "there is no directory of it"
    return (
        f"its directory stays: started again, the run goes on from {newest.path}. "
        f"`rollstream reset --run {config.run.name} --with-records` moves {config.run_dir} aside"
    )


def move_aside(config: Config) -> str:
    """Give the run's directory another name. Raises ConfigError while an `up` is at work in it."""
    if not config.run_dir.exists():
        return "there is no directory of it"
    with alone_in(config):
        target = _free_name(config.run_dir)
        try:
            config.run_dir.rename(target)
        except OSError as error:
            raise ConfigError(
                f"run.dir = {str(config.run.dir)!r}: {config.run_dir} cannot be moved to {target} ({error.strerror})"
            ) from None
    return f"its directory {config.run_dir} is now {target}"


def _free_name(directory: Path) -> Path:
    names = (f"{directory.name}.old{'' if number == 1 else f'-{number}'}" for number in count(1))
    return next(path for name in names if not (path := directory.with_name(name)).exists())
