"""Commands that ask a run to do something: pause, resume, drain, and go away.

In: a run. Out: a request in Redis that the workers see with their next heartbeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Sources, takes_config, with_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from pipeline.keys import Keys


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
    from pipeline.errors import UsageError

    async def body(redis: Redis, keys: Keys) -> list[str]:
        from pipeline.fleet import Fleet

        fleet = Fleet(redis, keys)
        await fleet.refuse_unknown()
        return await fleet.drain(target)

    chosen = with_redis(sources, body)
    if not chosen:
        raise UsageError(f"no worker has the role or id {target!r}; `rollstream workers` lists them")
    for worker_id in chosen:
        click.echo(f"draining {worker_id}")
    return 0


@click.command()
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@takes_config
def reset(sources: Sources, is_sure: bool) -> int:
    """Remove all that Redis holds of a run that is over. Its directory stays."""
    run = sources.load().run.name

    async def body(redis: Redis, keys: Keys) -> int:
        from pipeline.fleet import Fleet

        return await Fleet(redis, keys).forget_run()

    if not is_sure:
        click.confirm(f"Remove the groups, dead letters and accounts of run {run!r}?", abort=True)
    removed = with_redis(sources, body, starts_server=True)
    click.echo(f"removed {removed} keys of run {run!r}; its directory is untouched")
    return 0
