"""`rollstream demo`: the whole pipeline on this machine, from a cold start to a learned task.

In: numbers of steps and workers. Out: a run directory, a learning curve, and one summary of what
happened. It uses nothing but what any run uses: the same workers, queues and weight channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from pipeline.cli.console import Console
from pipeline.config import Config
from pipeline.demo.prepare import prepare
from pipeline.demo.settings import demo_config
from pipeline.demo.summary import num_steps_of_a_part, samples_before_and_after, summarise
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.local.crew import Crew
from pipeline.local.run import LocalRun
from pipeline.local.summary import last_coverage
from pipeline.records.recorder import plot_curve, read_metrics
from pipeline.streams import Ledger, connect

_POLL_S = 0.5
_DEFAULT_GENERATORS = {"transformers": 2, "vllm": 1}  # vLLM is three processes already


@dataclass(slots=True)
class Observed:
    """What a run said of itself while it went.

    statuses: worker id -> role and last status. ledger: after the last worker had gone.
    """

    statuses: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    ledger: Ledger | None = None


def run_demo(
    *,
    engine: Literal["transformers", "vllm"],
    steps: int | None,
    generators: int | None,
    scorers: int,
    seed: int,
    max_staleness: int | None,
    directory: Path | None,
    is_json: bool,
) -> int:
    """Exit code of the demo."""
    started = time.monotonic()
    directory = directory or Path("runs")
    name = _free_name(directory)
    click.echo("preparing: a tiny model learns the task by supervision, but not well")
    prepared = prepare(directory / name / "start", seed)
    config = demo_config(
        prepared, run_dir=directory, name=name, seed=seed, engine=engine, steps=steps, max_staleness=max_staleness
    )
    generators = generators or _DEFAULT_GENERATORS[engine]
    crew = f"{_counted(generators, 'generator')}, {_counted(scorers, 'scorer')}"
    click.echo(f"running: {crew}, 1 trainer, 1 exporter, 1 Valkey server")
    rl_started = time.monotonic()
    code, observed = asyncio.run(_run(config, Crew(num_generators=generators, num_scorers=scorers)))
    rl_wall_s = time.monotonic() - rl_started
    if code != 0:
        click.echo(f"error: the run ended with exit code {code}; what its workers said is above", err=True)
        return code
    if (num_steps := num_steps_of_a_part(config)) is not None:
        click.echo(f"stopped after {num_steps} of {config.trainer.max_steps} steps; records are in {config.run_dir}")
        return 0
    summary = summarise(config, observed.statuses, observed.ledger, rl_wall_s=rl_wall_s)
    summary["wall_s"] = round(time.monotonic() - started, 1)
    _show(config, summary, observed.ledger)
    if is_json:
        click.echo(json.dumps(summary))
    return 0


async def _run(config: Config, crew: Crew) -> tuple[int, Observed]:
    observed = Observed()
    with LocalRun(config, crew, persist=False) as run:
        console = Console(run.names)
        watch = asyncio.create_task(_watch(run.config, observed))
        try:
            code = await run.run(run.supervisor(console.on_line, console.on_exit), console.say)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        observed.ledger = await run.ledger()
        console.conclude(code)
    return code, observed


async def _watch(config: Config, observed: Observed) -> None:
    """Keep the last status of every worker, since those that leave take theirs along."""
    redis = connect(config.redis)
    fleet = Fleet(redis, Keys(config.run.name))
    try:
        while True:
            for worker in await fleet.workers():
                observed.statuses[worker.worker_id] = (worker.role, dict(worker.status))
            await asyncio.sleep(_POLL_S)
    finally:
        await redis.aclose()


def _show(config: Config, summary: dict[str, Any], ledger: Ledger | None) -> None:
    click.echo()
    for before, after in samples_before_and_after(config.run_dir):
        click.echo(f"  {before['prompt']:<10} before: {before['text']:<10} after: {after['text']:<10}")
    click.echo(
        f"\nheld-out exact match {summary['eval_before']:.2f} -> {summary['eval_after']:.2f} "
        f"in {summary['steps']} steps and {summary['rl_wall_s']:.0f} s; "
        f"staleness {summary['staleness_mean']:.2f} on average, {summary['staleness_max']:.0f} at most "
        f"(bound {summary['max_staleness']})"
    )
    click.echo(f"{summary['mixed_completions']} completions went on in mid-sentence while the weights changed")
    if ledger is not None:
        click.echo(f"ledger: {ledger.equation}")
    if (coverage := last_coverage(read_metrics(config.run_dir))) is not None:
        click.echo(f"prompts: {coverage}")
    curve = plot_curve(
        config.run_dir,
        config.run_dir / "curve.png",
        temperature=config.generation.temperature,
        eval_temperature=config.evaluation.temperature,
    )
    if curve is not None:
        click.echo(f"learning curve: {curve}")
    click.echo(f"run directory: {config.run_dir}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _free_name(directory: Path) -> str:
    """`demo`, or `demo-2` where that is taken."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 1
    while (directory / (name := "demo" if number == 1 else f"demo-{number}")).exists():
        number += 1
    (directory / name).mkdir()
    return name
