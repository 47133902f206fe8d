"""The merged output of several workers: `generator-1 | ...`, coloured on a terminal.

In: lines and exits from a supervisor. Out: lines for people. A line that cannot be written is lost; it never
ends the run.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

import click

from pipeline.cli.output import give_up, say_aside
from pipeline.local.supervisor import USAGE, WorkerExit

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
_SELF = "rollstream"


class Console:
    """Labels lines. names: all workers, so that labels line up."""

    def __init__(self, names: Sequence[str], out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        if isinstance(self._out, io.TextIOWrapper):
            self._out.reconfigure(errors="backslashreplace")  # workers may say what its encoding lacks
        self._width = max(map(len, [_SELF, *names]))
        self._colours = dict(zip(names, itertools.cycle(_COLOURS), strict=False))
        self._is_coloured = self._out.isatty() and not os.environ.get("NO_COLOR")
        self._to_mend: dict[str, list[str]] = {}
        self._num_lost = 0
        self._why_lost = ""

    def on_line(self, name: str, line: str) -> None:
        label = f"{name:<{self._width}} |"
        if self._is_coloured:
            # Workers come later, too.
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            label = click.style(label, fg="white" if name == _SELF else colour, bold=name == _SELF)
        try:
            print(label, line, file=self._out, flush=True)
        except BrokenPipeError:  # `rollstream up | head`: the run goes on without a reader
            give_up(self._out)
        except OSError as error:  # a full disk: there may be room again
            self._num_lost += 1
            self._why_lost = error.strerror or str(error)

    def on_exit(self, ended: WorkerExit) -> None:
        self._note(ended)
        if ended.code == 0:
            self.say(f"{ended.name} is done")
            return
        then = "" if ended.restart_in_s is None else f", starts again in {ended.restart_in_s:g} s"
        self.say(f"{ended.name} {_how(ended.code)} after {ended.seconds:.1f} s{then}")

    def _note(self, ended: WorkerExit) -> None:
        """What is to be said once more at the end."""
        if ended.given_up_after:
            why = ended.error or f"it {_how(ended.code)}"
            self._to_mend[f"{ended.name} crashed {ended.given_up_after} times: {why}"] = []
        if ended.code == USAGE and ended.error:
            self._to_mend.setdefault(ended.error, []).append(ended.name)

    def on_drain(self) -> None:
        self.say("draining; Ctrl-C ends everything at once")

    def say(self, text: str) -> None:
        """A line of our own."""
        self.on_line(_SELF, text)

    def conclude(self, code: int) -> int:
        """Say on stderr what a person must mend, once all other output has ended."""
        if self._num_lost:
            say_aside(f"warning: up to {self._num_lost} lines could not be written to the output: {self._why_lost}")
        if code:
            for complaint, names in self._to_mend.items():
                say_aside(f"error: {complaint}" + (f" ({', '.join(names)})" if names else ""))
        return code


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
