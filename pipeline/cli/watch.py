"""`rollstream status --watch`: the run again and again, as a picture on a terminal and as text elsewhere.

In: a way to look at the run. Out: what is to be seen until Ctrl-C, or until the run's own server is gone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from pipeline.errors import ConfigError, ServiceUnavailableError
from pipeline.run.status import RunStatus

_INTERVAL_S = 1.0


def watch(
    look: Callable[[], RunStatus],
    has_ended: Callable[[], bool],
    echo: Callable[[RunStatus], None],
    *,
    has_picture: bool,
) -> None:
    """Look every second. echo: prints one status where no picture is wanted, or can be drawn. Ctrl-C is the end."""
    is_picture = has_picture and sys.stdout.isatty()
    try:
        if is_picture:
            _draw(look, has_ended)
        while not is_picture and not has_ended():
            echo(look())
            time.sleep(_INTERVAL_S)
    except KeyboardInterrupt:
        if not is_picture:
            return
    echo(look())


def _draw(look: Callable[[], RunStatus], has_ended: Callable[[], bool]) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from pipeline.picture import History, picture

    console, history, note = Console(), History(), ""
    status = look()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not has_ended():
            if not note:
                history.add(status)
            lines = picture(status, history, screen_width=console.width, note=note)
            live.update(Group(*lines[: console.height]), refresh=True)
            time.sleep(_INTERVAL_S)
            try:
                status, note = look(), ""
            except ServiceUnavailableError as error:  # it may come back, and the workers wait for it, too
                note = str(error)
            except ConfigError:
                if not has_ended():
                    raise


def plain(render: Callable[[RunStatus], str]) -> Callable[[RunStatus], None]:
    """Statuses as text, an empty line behind each."""
    return lambda status: click.echo(f"{render(status)}\n")
