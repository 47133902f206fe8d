"""Commands that ask a run to do something: pause, resume, drain, scale, and go away.

In: a run. Out: a request in Redis that the workers see with their next heartbeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Sources, takes_config, with_redis
from pipeline.errors import ServiceUnavailableError, UsageError

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from pipeline.keys import Keys
    from pipeline.scaling import Scaling

_MOST = 256
_MAX_SHOWN = 80
_PATIENCE_S, _LOOK_EVERY_S = 10.0, 0.1


@click.command()
@takes_config
def pause(sources: Sources) -> int:
    """Let all workers finish what they hold and take nothing new."""

    async def body(redis: Redis, keys: Keys) -> None:
        from pipeline.fleet import Fleet

        fleet = Fleet(redis, keys)
        await fleet.refuse_unknown()
        await fleet.pause()

    with_redis(sources, body)
    click.echo("paused; `rollstream resume` goes on")
    return 0


@click.command()
@takes_config
def resume(sources: Sources) -> int:
    """Go on after a pause."""

    async def body(redis: Redis, keys: Keys) -> None:
        from pipeline.fleet import Fleet

        fleet = Fleet(redis, keys)
        await fleet.refuse_unknown()
        await fleet.resume()

    with_redis(sources, body)
    click.echo("resumed")
    return 0


@click.command()
@click.argument("target", metavar="ROLE|WORKER_ID")
@takes_config
def drain(sources: Sources, target: str) -> int:
    """Let a worker, or all of a role, hand back its work and exit."""
    from pipeline.errors import few

    async def body(redis: Redis, keys: Keys) -> tuple[list[str], list[str]]:
        from pipeline.fleet import Fleet

        fleet = Fleet(redis, keys)
        await fleet.refuse_unknown()
        meant = [worker for worker in await fleet.workers() if target in {worker.role, worker.worker_id}]
        return await fleet.drain(target), [worker.worker_id for worker in meant if not worker.is_alive]

    chosen, lost = with_redis(sources, body)
    if not chosen:
        why = f"; {few(lost)}: lost, nothing is left to drain" if lost else ""
        raise UsageError(f"no worker with the role or id {target!r} is alive{why}; `rollstream workers` lists them")
    for worker_id in chosen:
        click.echo(f"draining {worker_id}")
    return 0


@click.command()
@click.argument("numbers", nargs=-1, required=True, metavar="ROLE=NUMBER...")
@takes_config
def scale(sources: Sources, numbers: tuple[str, ...]) -> int:
    """Have other numbers of workers in a running `up`: generators=3 scorers=2.

    Those that come join at once; those that go are drained and lose nothing.
    """
    wanted = _read_numbers(numbers)

    async def body(redis: Redis, keys: Keys) -> dict[str, int]:
        from pipeline.fleet import Fleet
        from pipeline.scaling import Scaling

        await Fleet(redis, keys).refuse_unknown()
        scaling = Scaling(redis, keys)
        if kept := await scaling.kept():
            _refuse_absent(wanted, kept, keys.run)
        before = await scaling.ask(wanted)
        if before is None:
            raise UsageError(
                f"no `up` of run {keys.run!r} is there to carry this out; start one with `rollstream up`, or start "
                "workers one by one (`rollstream generator`) and let them go with `rollstream drain`"
            )
        await _until_heard(scaling, keys.run)
        return before

    for role, before in with_redis(sources, body).items():
        click.echo(f"{role}s: {before} -> {wanted[role]}; `rollstream workers` shows them come and go")
    return 0


def _refuse_absent(wanted: dict[str, int], kept: dict[str, int], run: str) -> None:
    """Raises UsageError for a stage that the run does not have."""
    for role in wanted:
        if role not in kept:
            raise UsageError(f"{role}s: run {run!r} has none, since [[scoring.{role}s]] of its settings is empty")


def _read_numbers(words: tuple[str, ...]) -> dict[str, int]:
    from pipeline.scaling import SCALED_ROLES

    roles = {f"{role}s": role for role in SCALED_ROLES}
    found: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in roles or not number.isascii() or not number.isdigit():
            raise UsageError(f"{word!r}: say {', '.join(roles)} and a number, for example generators=3 scorers=2")
        if len(number.lstrip("0")) > len(str(_MOST)) or int(number[-len(str(_MOST)) :]) > _MOST:
            shown = word if len(word) <= _MAX_SHOWN else word[: _MAX_SHOWN - 3] + "..."
            raise UsageError(f"{shown!r}: at most {_MOST} workers of one kind run on one machine")
        if roles[name] in found:
            raise UsageError(f"{word!r}: {name} is there twice")
        found[roles[name]] = int(number[-len(str(_MOST)) :])
    return found


async def _until_heard(scaling: Scaling, run: str) -> None:
    """Raises ServiceUnavailableError where the `up` does not take the request up."""
    import asyncio

    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not await scaling.is_heard():  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        raise ServiceUnavailableError(
            f"the `up` of run {run!r} has not answered within {_PATIENCE_S:g} s: it has just ended, or stands still"
        ) from None


@click.command()
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@click.option("--with-records", "has_records", is_flag=True, help="Move the run's directory aside, too.")
@takes_config
def reset(sources: Sources, is_sure: bool, has_records: bool) -> int:
    """Remove all that Redis holds of a run that is over.

    Its directory stays, and a run of the same name goes on from the checkpoints in it, unless it is moved aside.
    """
    from pipeline.local.records import move_aside, what_stays

    config = sources.load()
    run = config.run.name

    async def body(redis: Redis, keys: Keys) -> int:
        from pipeline.fleet import Fleet

        return await Fleet(redis, keys).forget_run()

    if not is_sure:
        too = f", and move {config.run_dir} aside" if has_records else ""
        _ask(f"Remove the groups, dead letters and accounts of run {run!r}{too}?")
    removed = with_redis(sources, body, starts_server=True)
    records = move_aside(config) if has_records else what_stays(config)
    click.echo(f"removed {removed} keys of run {run!r}; {records}")
    return 0


def _ask(question: str) -> None:
    """Raises UsageError unless a person says yes."""
    try:
        is_sure = click.confirm(question)
    except click.Abort:  # Nobody is there to answer, or has pressed Ctrl-C.
        click.echo()
        is_sure = False
    if not is_sure:
        raise UsageError("nothing was removed; with --yes nobody is asked")
