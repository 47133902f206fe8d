"""Whose turn it is to train a run: one trainer's at a time, and the next one waits for it.

In: the run's lock. Out: the lock, or the end of the wait. A second trainer is a spare, not a mistake that ends it: a
job that is started again while its predecessor is still leaving follows it, and nobody has to guess when.
"""

from __future__ import annotations

from pipeline.worker.context import WorkerContext

_LOCK_WAIT_S = 0.5


async def take_the_run(context: WorkerContext) -> bool:
    """Wait until no other trainer holds the run; False when the worker drains before that."""
    said: set[tuple[str, bool]] = set()
    while not await context.unless_draining(context.fleet.acquire_trainer(context.worker_id, context.trainer_term_s)):
        holder = await _say_who_trains(context, said)
        context.waiting_for(f"another trainer of this run to end ({holder})")
        await context.wait_for_any(timeout_s=_LOCK_WAIT_S)
        if context.draining.is_set():
            return False
    context.waiting_for(None)
    return True


async def _say_who_trains(context: WorkerContext, said: set[tuple[str, bool]]) -> str:
    """Once for each, and once more when it is dead: then its right lapses within queues.lease_s. Returns who it is."""
    holder, left_s = await context.fleet.trainer_holder() or ("", 0.0)
    found = next((worker for worker in await context.fleet.workers() if worker.worker_id == holder), None)
    is_alive = found is not None and found.is_alive
    if holder and (holder, is_alive) not in said:
        said.add((holder, is_alive))
        context.log.warning(
            "another_trainer",
            holder=holder,
            state="alive" if is_alive else "gone without a word",
            free_within_s=round(left_s, 1),
            this_one="waits, trains nothing meanwhile, and goes on when that one has ended"
            if is_alive
            else "goes on when the lock of that one lapses",
            way_out=f"end this one, if it was started by mistake; `rollstream drain {holder}` lets that one hand over"
            if is_alive
            else "",
        )
    return holder
