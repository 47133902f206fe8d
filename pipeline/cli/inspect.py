"""Commands that show a run: status, workers, streams, rollouts.

In: a run. Out: tables for people, `--json` for programs. They change nothing, but `streams requeue`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.cli.options import Sources, as_json, takes_config, with_redis
from pipeline.cli.output import echo_json, echo_table
from pipeline.errors import UsageError, few
from pipeline.keys import Keys, Stream

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from pipeline.fleet import WorkerInfo
    from pipeline.queues.leases import DeadLetter, Queued
    from pipeline.queues.ledger import Depth, Ledger
    from pipeline.status import RunStatus
    from pipeline.streams import Streams

R = TypeVar("R")
_CONSUMER = "command-line"
_KINDS = ((True, "evaluation"), (False, "training"))
_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
as_count = click.option("-n", "--count", type=click.IntRange(min=1), default=10, show_default=True)


@click.command()
@takes_config
@click.option("--watch", "is_watch", is_flag=True, help="Go on until Ctrl-C; on a terminal, a picture.")
@click.option("--schema", "is_schema", is_flag=True, help="Print the JSON schema of what --json prints.")
@as_json
def status(sources: Sources, is_watch: bool, is_schema: bool, is_json: bool) -> int:
    """Show queues, workers, progress, and which stage limits the rate; of a run that has ended, how it ended."""
    from pipeline.local.server_address import is_without_server
    from pipeline.status import render

    if is_schema:
        from pipeline.run.status_schema import status_schema

        echo_json(status_schema())
        return 0
    if not is_watch:
        now = _collect_status(sources, names_others=True)
        echo_json(now) if is_json else click.echo(render(now))
        return 0
    from pipeline.cli.watch import plain, watch

    watch(
        lambda: _collect_status(sources),
        lambda: is_without_server(sources.load()),
        echo_json if is_json else plain(render),
        has_picture=not is_json,
    )
    return 0


@click.command()
@takes_config
@as_json
def workers(sources: Sources, is_json: bool) -> int:
    """List the workers of a run; --json adds all that they last said."""
    from pipeline.status import worker_table

    async def body(redis: Redis, keys: Keys) -> list[WorkerInfo]:
        from pipeline.fleet import Fleet

        return await Fleet(redis, keys).workers()

    found = with_redis(sources, body)
    if is_json:
        echo_json(found)
        return 0
    click.echo("\n".join(worker_table(found, has_address=True)) if found else "no workers")
    return 0


@click.group(invoke_without_command=True)
@takes_config
@as_json
@click.pass_context
def streams(context: click.Context, sources: Sources, is_json: bool) -> int:
    """Show how full the queues are and where all groups went; peek; bring dead letters back."""
    context.obj = sources
    if context.invoked_subcommand is not None:
        return 0
    from pipeline.status import stream_table

    async def body(streams: Streams) -> tuple[Mapping[Stream, Depth], Ledger]:
        return await streams.depths(), await streams.ledger()

    depths, ledger = _with_streams(sources, body)
    if is_json:
        echo_json({"streams": depths, "ledger": ledger, "balances": ledger.balances})
        return 0
    click.echo("\n".join(stream_table(depths)))
    verdict = "balances" if ledger.balances else "DOES NOT BALANCE"
    click.echo(f"ledger {verdict}: {ledger.equation}")
    return 0


@streams.command("peek")
@click.argument("stream", type=click.Choice([stream.value for stream in Stream]))
@takes_config
@as_count
@as_json
def peek(sources: Sources, stream: str, count: int, is_json: bool) -> int:
    """Show the oldest groups of a queue without touching them."""

    async def body(streams: Streams) -> Sequence[Queued]:
        return await streams.peek(Stream(stream), count)

    entries = _with_streams(sources, body)
    if is_json:
        echo_json(entries)
        return 0
    rows = [
        (e.entry_id, e.group_id, e.attempt, e.weight_version, e.consumer or "", e.num_payload_bytes) for e in entries
    ]
    echo_table(("entry", "group", "attempt", "version", "held_by", "bytes"), rows, nothing="empty")
    return 0


@streams.command("dead-letters")
@click.option("--save", "folder", type=_FOLDER, metavar="DIR", help="Write each payload to DIR/LETTER.msgpack.")
@takes_config
@as_count
@as_json
def dead_letters(sources: Sources, count: int, is_json: bool, folder: Path | None) -> int:
    """Show groups that no one could process, and why."""
    letters = _with_streams(sources, lambda streams: streams.dead_letters(count))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for letter in letters:
            (folder / f"{letter.letter_id}.msgpack").write_bytes(letter.payload)
    if is_json:
        echo_json([_without_payload(letter) for letter in letters])
        return 0
    rows = [(x.letter_id, x.group_id, x.stream, x.attempt, x.reason) for x in letters]
    echo_table(("letter", "group", "stream", "attempt", "reason"), rows, nothing="no dead letters")
    return 0


@streams.command("requeue")
@click.argument("letters", nargs=-1, metavar="[LETTER]...")
@click.option("--all", "is_all", is_flag=True, help="All dead letters.")
@click.option("--payload", type=_FILE, metavar="FILE", help="A mended payload for the one letter that is named.")
@takes_config
def requeue(sources: Sources, letters: tuple[str, ...], is_all: bool, payload: Path | None) -> int:
    """Put dead letters back into the queue in which they died."""
    if bool(letters) == is_all:
        raise UsageError("name the letters (`rollstream streams dead-letters` lists them), or say --all")
    if payload is not None and len(letters) != 1:
        raise UsageError(f"--payload {payload} is for one letter: name it")
    mended = {} if payload is None else {letters[0]: payload.read_bytes()}
    ids = None if is_all else list(letters)
    moved = _with_streams(sources, lambda streams: streams.requeue(ids, mended), must_exist=True)
    click.echo(f"{moved} put back")
    return 0


@click.group()
def rollouts() -> None:
    """Read sample completions that the trainer has recorded."""


@rollouts.command("tail")
@takes_config
@as_count
@as_json
def tail(sources: Sources, count: int, is_json: bool) -> int:
    """Show the newest samples."""
    from pipeline.records.recorder import tail_samples

    config = sources.load()
    samples = tail_samples(config.run_dir, count)
    if not samples:
        click.echo(f"no samples in {config.run_dir}: the trainer writes them, on its machine", err=True)
    for sample in samples:
        _show_sample(sample, is_json)
    return 0


@rollouts.command("show")
@click.argument("group_id")
@takes_config
@as_json
def show(sources: Sources, group_id: str, is_json: bool) -> int:
    """Show the newest sample of one group."""
    from pipeline.records.recorder import find_sample

    config = sources.load()
    sample = find_sample(config.run_dir, group_id)
    if sample is None:
        raise UsageError(f"no sample of group {group_id!r} in {config.run_dir}; tracking.samples_per_step keeps some")
    _show_sample(sample, is_json)
    return 0


def _collect_status(sources: Sources, *, names_others: bool = False) -> RunStatus:
    """names_others: of a run that the server does not know it is said which ones it does, which reads all keys."""
    from pipeline.local.server_address import is_without_server
    from pipeline.run.record import as_status, complete, read_record

    config = sources.load()
    if is_without_server(config) and (record := read_record(config.run_dir)) is not None:
        return as_status(record)

    async def body(redis: Redis, keys: Keys) -> RunStatus:
        from pipeline.fleet import Fleet
        from pipeline.status import collect

        found = await collect(redis, keys)
        if found.run_id is not None or not names_others:
            return found
        there = few(await Fleet(redis, keys).other_runs())
        return replace(found, limit=replace(found.limit, reason=f"{found.limit.reason} (runs there: {there})"))

    now = with_redis(sources, body)
    if now.step is None and (record := read_record(config.run_dir)) is not None:
        return complete(now, record)
    return now


def _with_streams(sources: Sources, body: Callable[[Streams], Awaitable[R]], *, must_exist: bool = False) -> R:
    """What `body` finds in the streams of a run that may be over. must_exist: before it changes anything."""
    settings = sources.load().queues

    async def opened(redis: Redis, keys: Keys) -> R:
        from pipeline.fleet import Fleet
        from pipeline.streams import Streams

        if must_exist:
            await Fleet(redis, keys).refuse_unknown()
        return await body(Streams(redis, keys, settings, consumer=_CONSUMER))

    return with_redis(sources, opened, starts_server=True)


def _without_payload(letter: DeadLetter) -> dict[str, object]:
    fields = asdict(letter)
    return {**fields, "payload": len(fields["payload"])}


def _show_sample(sample: Mapping[str, Any], is_json: bool) -> None:
    """A record may be older than this version, or come from other hands: shows what there is of it."""
    if is_json:
        echo_json(sample)
        return
    kind = next((f" ({name})" for is_it, name in _KINDS if sample.get("is_evaluation") is is_it), "")
    click.echo(f"step {sample.get('step', '?')}, group {sample.get('group_id', '?')}{kind}")
    if "prompt" in sample:
        click.echo(f"  prompt: {sample['prompt']!r}")
    completions = sample.get("completions")
    for completion in completions if isinstance(completions, list) else []:
        click.echo(f"  {_completion(completion)}")


def _completion(completion: object) -> str:
    if not isinstance(completion, Mapping):
        return repr(completion)
    said = [f"{name} {completion[name]}" for name in ("reward", "versions") if name in completion]
    return ": ".join([*([", ".join(said)] if said else []), repr(completion.get("text"))])
