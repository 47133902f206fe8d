"""The command `rollstream`: one small function for each thing a person can ask for.

In: words. Out: text on stdout, an exit code. Nothing heavy is imported before a command needs it,
and no mistake of the user's ends in a traceback: a line `error: ...` on stderr says what to do.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

import click

from pipeline import __version__, startup
from pipeline.cli.checkpoints import checkpoints
from pipeline.cli.control import drain, pause, reset, resume, scale
from pipeline.cli.inspect import rollouts, status, streams, workers
from pipeline.cli.keys import keys
from pipeline.cli.output import flush, open_missing, say_aside
from pipeline.cli.roles import demo, exporter, generator, judge, scorer, teacher, trainer, up
from pipeline.cli.settings import config, doctor
from pipeline.errors import RollstreamError

INTERRUPTED = 130
FAILURE = 1
USAGE = 2
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class InOrder(click.Group):
    """Lists its commands in the order in which one needs them, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rollstream")
def cli() -> None:
    """Asynchronous reinforcement learning for language models over Redis streams."""


for command in (
    demo,
    up,
    generator,
    scorer,
    teacher,
    judge,
    trainer,
    exporter,
    status,
    workers,
    streams,
    rollouts,
    pause,
    resume,
    drain,
    scale,
    reset,
    config,
    checkpoints,
    keys,
    doctor,
):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the script `rollstream`."""
    startup.begin()
    open_missing()
    try:
        code = run(argv)
    finally:
        flush()
        startup.settle()
    sys.exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Execute one command line; returns its exit code."""
    try:
        result = cli.main(args=argv, prog_name="rollstream", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command: its help, which says what there is
        error.show()
        return error.exit_code
    except click.ClickException as error:
        # Some of click's messages are lists that it breaks into lines and tabs.
        return _fail(" ".join(error.format_message().split()), USAGE)
    except RollstreamError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        what = error.filename or "what this command has to say"
        return _fail(f"{what} cannot be written: {error.strerror}", FAILURE)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        say_aside(f"error: {line}")
    return code
