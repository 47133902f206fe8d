"""The state of a run at one instant, from Redis alone.

In: a connection. Out: one carrier that `rollstream status --json` prints and the exporter serves.
It changes nothing and needs no worker to answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.prompts.statistics import Coverage
from pipeline.queues.accounts import Accounts
from pipeline.queues.ledger import Depth, Ledger
from pipeline.roster import RunFacts, WorkerInfo
from pipeline.run.limits import Limit, limiting_stage
from pipeline.run.server import look_at
from pipeline.scaling import Scaling

if TYPE_CHECKING:
    from redis.asyncio import Redis

_CONSUMER = "status"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one instant.

    run: name. run_id: None when nobody has joined. at: Unix seconds by Redis's clock.
    weight_version: newest of the trainer. is_paused, stop_reason: what people or the trainer asked
    for. trainer: worker id that holds the trainer's lock. step, reward_mean, eval_reward,
    staleness_mean (versions): of the last step; None before that. prompts: of the trainer's data set. max_staleness:
    its bound, as the trainer has it. tokens_per_s (trained) and generated_tokens_per_s (sum over generators): over the
    last minute. streams: by name, in order of flow. ledger: where all groups went; ledger_balances:
    whether it adds up. workers: lost ones included. limit: what holds the run back.
    wanted_workers: by role, what an `up` that answers `rollstream scale` keeps here; empty without one.
    redis_memory_bytes, redis_memory_max_bytes (0: no bound): None where the server does not tell.
    """

    run: str
    run_id: str | None
    at: float
    weight_version: int | None
    is_paused: bool
    stop_reason: str | None
    trainer: str | None
    step: int | None
    reward_mean: float | None
    eval_reward: float | None
    staleness_mean: float | None
    max_staleness: int | None
    tokens_per_s: float | None
    generated_tokens_per_s: float
    streams: Mapping[Stream, Depth]
    ledger: Ledger
    ledger_balances: bool
    workers: tuple[WorkerInfo, ...]
    limit: Limit
    redis_memory_bytes: int | None
    redis_memory_max_bytes: int | None
    prompts: Coverage | None = None
    wanted_workers: Mapping[str, int] = field(default_factory=dict)


async def collect(redis: Redis, keys: Keys) -> RunStatus:
    """The run as it is now. A run that does not exist is empty."""
    fleet = Fleet(redis, keys)
    accounts = Accounts(redis, keys, consumer=_CONSUMER)
    facts = await fleet.facts()
    workers = tuple(await fleet.workers())
    streams = in_use(await accounts.depths(), facts)
    ledger = await accounts.ledger()
    trainer = _trainer(workers, facts.trainer)
    said = trainer.status if trainer else {}
    step = _whole(said.get("step"))
    server = await look_at(redis)
    last_death = await accounts.last_death() if ledger.dead else None
    return RunStatus(
        run=keys.run,
        run_id=facts.run_id,
        at=facts.at,
        # As of the step that is shown; the run's own is a moment ahead of what the trainer says of it.
        weight_version=_whole(said.get("weight_version", facts.weight_version)),
        is_paused=facts.is_paused,
        stop_reason=facts.stop_reason,
        trainer=facts.trainer,
        step=step,
        reward_mean=_number(said.get("reward_mean")),
        eval_reward=_number(said.get("eval_reward")),
        staleness_mean=_number(said.get("staleness_mean")),
        max_staleness=_whole(said.get("max_staleness")),
        tokens_per_s=_number(said.get("tokens_per_s")) if trainer and trainer.is_alive and step is not None else None,
        generated_tokens_per_s=sum(
            _number(worker.status.get("tokens_per_s")) or 0.0
            for worker in workers
            if worker.role == "generator" and worker.is_alive
        ),
        streams=streams,
        ledger=ledger,
        ledger_balances=ledger.balances,
        workers=workers,
        limit=limiting_stage(streams, workers, facts, last_death, server_refusal=server.refusal),
        redis_memory_bytes=server.memory_bytes,
        redis_memory_max_bytes=server.memory_max_bytes,
        prompts=Coverage.of(said),
        wanted_workers=await Scaling(redis, keys).kept(),
    )


def in_use(depths: Mapping[Stream, Depth], facts: RunFacts) -> dict[Stream, Depth]:
    """Without the streams of stages that the run does not have."""
    absent = {
        stream
        for stream, is_there in ((Stream.TO_TEACH, facts.has_teachers), (Stream.TO_JUDGE, facts.has_judges))
        if not is_there and not depths[stream].length
    }
    return {stream: depth for stream, depth in depths.items() if stream not in absent}


def _trainer(workers: Sequence[WorkerInfo], holder: str | None) -> WorkerInfo | None:
    """The one that has the run; where nobody has, the last that had done a step."""
    trainers = [worker for worker in workers if worker.role == "trainer"]
    at_work = (worker for worker in trainers if worker.worker_id == holder)
    before = (worker for worker in sorted(trainers, key=lambda worker: worker.age_s) if "step" in worker.status)
    return next(at_work, None) or next(before, None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) else None
