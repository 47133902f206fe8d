"""A worker process for tests of what all workers have in common: `python -m tests.sample_worker BODY --set k=v`."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time

import psutil

from pipeline.errors import DataError
from pipeline.keys import Stream
from pipeline.settings.files import load_config
from pipeline.worker.lifecycle import WorkerContext, run_worker


async def idle(context: WorkerContext) -> None:
    """Until drained."""
    context.set_ready(True)
    context.log.info("body_runs")
    await context.draining.wait()


async def holds_a_lease(context: WorkerContext) -> None:
    """Claims what there is and keeps it."""
    leases = await context.streams.claim(Stream.PROMPTS, 8, block_s=5)
    context.keeper.hold(leases)
    context.log.info("body_runs", leases=len(leases))
    await context.draining.wait()


async def stubborn(context: WorkerContext) -> None:
    """Does not care for a drain."""
    context.log.info("body_runs")
    await asyncio.Event().wait()


async def stuck(context: WorkerContext) -> None:
    """Has a thread that cannot be stopped."""
    thread = asyncio.to_thread(time.sleep, 600)
    context.log.info("body_runs")
    await thread


async def hashes(context: WorkerContext) -> None:
    """One step in a thread, of many minutes."""
    context.set_ready(True)
    context.log.info("body_runs")
    await asyncio.to_thread(hashlib.pbkdf2_hmac, "sha256", b"password", b"salt", 2_000_000_000)
    context.log.info("step_is_done")


async def crashes(context: WorkerContext) -> None:
    """A defect."""
    raise ZeroDivisionError("a defect")


async def misreads(context: WorkerContext) -> None:
    """The user's mistake, found late, inside a group of tasks."""
    async with asyncio.TaskGroup() as group:
        group.create_task(context.draining.wait())
        raise DataError("data.path = 'x.jsonl': row 3 has no column 'prompt'")


async def ends(context: WorkerContext) -> None:
    """Done, after saying how large the process is."""
    # Not ru_maxrss: that counts what the parent had at the fork.
    megabytes = psutil.Process().memory_info().rss / 2**20
    heavy = sorted({"torch", "transformers", "vllm"} & sys.modules.keys())
    context.log.info("size", megabytes=megabytes, heavy=heavy)


async def trains(context: WorkerContext) -> None:
    """Holds the trainer's lock."""
    await context.fleet.acquire_trainer(context.worker_id, context.config.queues.lease_s)
    context.keep_trainer_lock()
    context.log.info("body_runs")
    await context.draining.wait()


async def rests(context: WorkerContext) -> None:
    """Says when a pause begins and ends."""
    context.log.info("body_runs")
    while not context.draining.is_set():
        if context.is_paused:
            context.log.info("body_rests")
            await context.wait_while_paused()
            context.log.info("body_goes_on")
        await context.wait_for_any(timeout_s=0.02)


BODIES = (idle, holds_a_lease, stubborn, stuck, hashes, crashes, misreads, ends, trains, rests)


def main(words: list[str]) -> int:
    """Exit code of a worker: the name of its body, then settings."""
    name, *settings = words
    config = load_config([], environ={}, overrides=[word for word in settings if word != "--set"])
    return run_worker("scorer", config, {body.__name__: body for body in BODIES}[name])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
