"""Metrics of a run as a whole, which no single worker owns.

In: a `RunStatus`. Out: gauges with the label `run`, all of one instant. A series exists only as
long as what it describes: departed workers vanish, and without Redis only `redis_up` is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.instruments import PREFIX, Kind, Spec
from pipeline.keys import TAKEN_BY
from pipeline.run.status import RunStatus

Values: TypeAlias = Iterable[tuple[tuple[str, ...], float]]

STAGES = (*TAKEN_BY.values(), "weights", "control", "redis")


def _gauge(name: str, unit: str, help: str, reading: str, *labels: str) -> Spec:
    return Spec(name=PREFIX + name, kind=Kind.GAUGE, unit=unit, help=help, reading=reading, labels=labels)


REDIS_UP = _gauge("redis_up", "1 or 0", "Whether Redis answered the last time.", "0: all workers wait.")
READ_SECONDS = _gauge(
    "run_read_seconds", "seconds", "Time that Redis took to say all this.", "Long: the server, or the way to it."
)


def _workers(status: RunStatus) -> Values:
    counts: dict[tuple[str, ...], int] = {}
    for worker in status.workers:
        state = str(worker.status.get("state", "unknown")) if worker.is_alive else "lost"
        counts[worker.role, state] = counts.get((worker.role, state), 0) + 1
    return list(counts.items())


def _heartbeats(status: RunStatus) -> Values:
    ages: dict[tuple[str, ...], float] = {}
    for worker in status.workers:
        ages[(worker.role,)] = max(worker.age_s, ages.get((worker.role,), 0.0))
    return list(ages.items())


def _ledger(status: RunStatus) -> Values:
    ledger = status.ledger
    names = (
        "fed",
        "trained",
        "uncommitted",
        "dead",
        "live",
        "refused",
        "eval_fed",
        "eval_done",
        "eval_dead",
        "eval_live",
    )
    plain = [((name,), float(getattr(ledger, name))) for name in names]
    return [*plain, (("dropped",), float(ledger.num_dropped))]


def _optional(value: float | None) -> Values:
    return [] if value is None else [((), value)]


RUN_METRICS: dict[Spec, Callable[[RunStatus], Values]] = {
    _gauge(
        "stream_length", "groups", "Groups in a stream.", "Work piles up in front of the slowest stage.", "stream"
    ): lambda status: [((name.value,), depth.length) for name, depth in status.streams.items()],
    _gauge(
        "stream_backlog",
        "groups",
        "Groups that no worker has claimed.",
        "The lag: scale the next stage by it.",
        "stream",
    ): lambda status: [((name.value,), depth.backlog) for name, depth in status.streams.items()],
    _gauge(
        "stream_pending", "groups", "Groups that a worker holds.", "Held by the next stage.", "stream"
    ): lambda status: [((name.value,), depth.pending) for name, depth in status.streams.items()],
    _gauge(
        "oldest_pending_seconds",
        "seconds",
        "Since the oldest held group came into its stream.",
        "Much longer than the others take: its worker is stuck or gone.",
        "stream",
    ): lambda status: [((name.value,), depth.oldest_pending_s) for name, depth in status.streams.items()],
    _gauge(
        "oldest_waiting_seconds",
        "seconds",
        "Since the oldest unclaimed group came into its stream.",
        "Grows: nobody takes from this stream.",
        "stream",
    ): lambda status: [((name.value,), depth.oldest_waiting_s) for name, depth in status.streams.items()],
    _gauge(
        "ledger", "groups", "Groups by what became of them.", "fed = trained + dropped + dead + live.", "state"
    ): _ledger,
    _gauge(
        "ledger_dropped",
        "groups",
        "Dropped groups by reason.",
        "As rollstream_dropped_total, over all trainers.",
        "reason",
    ): lambda status: [((reason,), count) for reason, count in status.ledger.dropped.items()],
    _gauge(
        "ledger_balances", "1 or 0", "Whether every fed group is accounted for.", "0 is a defect: report it."
    ): lambda status: [((), float(status.ledger_balances))],
    _gauge("workers", "workers", "Workers by role and state.", "lost: gone without a word.", "role", "state"): _workers,
    _gauge(
        "workers_wanted",
        "workers",
        "Workers that the `up` of the run keeps, by role.",
        "What `rollstream scale` or the autoscaler has asked for.",
        "role",
    ): lambda status: [((role,), number) for role, number in status.wanted_workers.items()],
    _gauge(
        "run_weight_version", "version", "Newest weights of the run.", "Compare with those of the generators."
    ): lambda status: _optional(status.weight_version),
    _gauge("paused", "1 or 0", "Whether the run is paused.", "`rollstream resume` goes on."): lambda status: [
        ((), float(status.is_paused))
    ],
    _gauge(
        "limiting_stage", "1 or 0", "The stage that limits the rate.", "Add workers there.", "stage"
    ): lambda status: [((stage,), float(stage == status.limit.stage)) for stage in STAGES],
    _gauge(
        "blocked",
        "1 or 0",
        "Whether the run stands still because of a stage.",
        "`rollstream status` says why.",
        "stage",
    ): lambda status: [((stage,), float(stage == status.limit.stage and status.limit.is_blocked)) for stage in STAGES],
    _gauge(
        "max_staleness_versions",
        "versions",
        "staleness.max_staleness, as the trainer has it.",
        "Generators further behind than this make tokens that are too old.",
    ): lambda status: _optional(status.max_staleness),
    _gauge(
        "heartbeat_age_seconds",
        "seconds",
        "Since the last sign of life of a worker, by its role: the longest.",
        "Much longer than worker.heartbeat_s: it is stuck, or gone.",
        "role",
    ): _heartbeats,
    _gauge(
        "redis_memory_bytes", "bytes", "Memory of the Redis server.", "Bounded by admission; growth is someone else's."
    ): lambda status: _optional(status.redis_memory_bytes),
    _gauge(
        "redis_memory_max_bytes",
        "bytes",
        "Memory that the Redis server may take; 0 for all there is.",
        "What is full takes no writes, and the run waits.",
    ): lambda status: _optional(status.redis_memory_max_bytes),
}


class RunCollector(Collector):
    """Serves the last status it was shown. None: Redis did not answer."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._status: RunStatus | None = None
        self._read_s = 0.0

    def show(self, status: RunStatus | None, *, read_s: float = 0.0) -> None:
        """From now on serve this. read_s: how long it took to read."""
        self._status, self._read_s = status, read_s

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        status = self._status
        yield self._family(REDIS_UP, [((), float(status is not None))])
        if status is not None:
            yield self._family(READ_SECONDS, [((), self._read_s)])
            for spec, values in RUN_METRICS.items():
                yield self._family(spec, values(status))

    def _family(self, spec: Spec, values: Values) -> Metric:
        family = GaugeMetricFamily(spec.name, spec.help, labels=["run", *spec.labels])
        for labels, value in values:
            family.add_metric([self._run, *labels], value)
        return family
