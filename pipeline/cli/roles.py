"""Commands that run something: one worker, a whole run on this machine, the demonstration.

In: settings. Out: the exit code of what ran.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Literal

import click

from pipeline import startup
from pipeline.cli.options import Sources, as_json, can_resume, takes_config
from pipeline.cli.output import say_aside

Option = Callable[[Callable[[Sources], int]], Callable[[Sources], int]]


def _worker(role: str, summary: str, *options: Option) -> click.Command:
    def run(sources: Sources) -> int:
        from pipeline.local.server_address import with_server
        from pipeline.ranks.place import place_of
        from pipeline.worker.shutdown import ignore_signals

        # Before the worker listens to signals, a signal finds nothing to drain.
        signal.signal(signal.SIGTERM, _leave)
        startup.import_structlog()
        config = sources.load()
        if place_of(os.environ).leads or role != "trainer":
            config = with_server(config, sources.words)
        main: Callable[..., int] = import_module(f"workers.{role}").main
        try:
            return main(config)
        finally:
            # It has handed everything back. A signal now, which Python no longer handles, would only
            # replace the exit code that says how it ended.
            ignore_signals()

    command: Callable[[Sources], int] = run
    for option in options:
        command = option(command)
    named = click.command(role, help=f"{summary} Runs in the foreground until it is drained (SIGTERM, Ctrl-C).")
    return named(takes_config(command))


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


generator = _worker("generator", "Sample completions for prompts with the newest weights.")
scorer = _worker("scorer", "Give completions their rewards.")
teacher = _worker("teacher", "Give completions the logprobs of models to learn from.")
judge = _worker("judge", "Give completions rewards by models that judge them.")
trainer = _worker("trainer", "Feed prompts, train on scored groups, publish weights.", can_resume)
exporter = _worker("exporter", "Serve metrics of the queues and of the whole run.")


@click.command()
@takes_config
@can_resume
@click.option("--generators", "num_generators", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--scorers", "num_scorers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--teachers", "num_teachers", type=click.IntRange(min=1), help="Where the run has any.  [default: 1]")
@click.option("--judges", "num_judges", type=click.IntRange(min=1), help="Where the run has any.  [default: 1]")
@click.option(
    "--exporter/--no-exporter", "has_exporter", default=True, show_default=True, help="Metrics of the queues."
)
@click.option("--autoscale", "is_autoscaled", is_flag=True, help="Choose the numbers by what the run needs.")
def up(
    sources: Sources,
    num_generators: int,
    num_scorers: int,
    num_teachers: int | None,
    num_judges: int | None,
    has_exporter: bool,
    is_autoscaled: bool,
) -> int:
    """Run the whole pipeline on this machine, supervised.

    Workers that fail are started again. It ends when the trainer is done; Ctrl-C drains, a second
    Ctrl-C ends everything at once.
    """
    import asyncio
    import time

    from pipeline.checks.config import check_quickly
    from pipeline.cli.console import Console
    from pipeline.errors import UsageError
    from pipeline.local.crew import Crew
    from pipeline.local.run import LocalRun
    from pipeline.local.summary import summary_lines
    from pipeline.run.resumption import already_over, checkpoint_to_go_on_from

    started = time.monotonic()
    if is_autoscaled:
        sources = sources.with_overrides("autoscale.enabled=true")
    config = sources.load()
    if ending := already_over(config, checkpoint_to_go_on_from(config)):
        click.echo(f"run {config.run.name!r} is already over: {ending.reason}; {ending.to_go_on}")
        return 0
    for warning in check_quickly(config).warnings:
        say_aside(f"warning: {warning}")
    for option, number, models in (
        ("teachers", num_teachers, config.scoring.teachers),
        ("judges", num_judges, config.scoring.judges),
    ):
        if number is not None and not models:
            raise UsageError(f"--{option} {number}: the run has none; name one in a [[scoring.{option}]] table")
    crew = Crew(
        num_generators=num_generators,
        num_scorers=num_scorers,
        num_teachers=num_teachers or 1,
        num_judges=num_judges or 1,
        has_exporter=has_exporter,
    )
    with LocalRun(config, crew) as run:
        console = Console(run.names)
        console.say(f"run {run.config.run.name!r} in {run.config.run_dir}")
        supervisor = run.supervisor(console.on_line, console.on_exit, console.on_drain)
        code = asyncio.run(run.run(supervisor, console.say))
        if code == 0:
            for line in summary_lines(run.config, asyncio.run(run.ledger()), seconds=time.monotonic() - started):
                console.say(line)
        return console.conclude(code)


@click.command()
@click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps.")
@click.option("--engine", type=click.Choice(["transformers", "vllm"]), default="transformers", show_default=True)
@click.option("--generators", type=click.IntRange(min=1), help="Generator processes.  [default: 2, with vLLM 1]")
@click.option("--scorers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--max-staleness", type=click.IntRange(min=0), help="In weight versions.")
@click.option("--dir", "directory", type=click.Path(path_type=Path, file_okay=False), help="Where records are kept.")
@as_json
def demo(
    steps: int | None,
    engine: Literal["transformers", "vllm"],
    generators: int | None,
    scorers: int,
    seed: int,
    max_staleness: int | None,
    directory: Path | None,
    is_json: bool,
) -> int:
    """Watch a tiny model learn, with all processes, in about a minute on two CPU cores."""
    from pipeline.demo.command import run_demo

    return run_demo(
        engine=engine,
        steps=steps,
        generators=generators,
        scorers=scorers,
        seed=seed,
        max_staleness=max_staleness,
        directory=directory,
        is_json=is_json,
    )
