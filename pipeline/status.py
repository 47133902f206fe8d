"""The state of a run as text for a person.

In: a `RunStatus`. Out: a few aligned lines: what limits the run, its queues, its ledger, its
workers. Programs read the carrier itself (`rollstream status --json`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.keys import Stream
from pipeline.messages import Json
from pipeline.queues.ledger import Depth
from pipeline.roster import WorkerInfo
from pipeline.run.limits import Limit, limiting_stage
from pipeline.run.status import RunStatus, collect
from pipeline.tables import table

__all__ = [
    "Limit",
    "RunStatus",
    "collect",
    "headline",
    "ledger_lines",
    "limit_line",
    "limiting_stage",
    "rates",
    "render",
    "stream_table",
    "worker_table",
]


def render(status: RunStatus) -> str:
    """The status as plain text, without a line break at the end."""
    parts = [headline(status), limit_line(status)]
    if status.streams:
        parts += ["", *stream_table(status.streams)]
    if status.streams or status.ledger.fed:
        parts += ["", *ledger_lines(status)]
    if status.prompts is not None:
        parts.append(f"prompts: {status.prompts}")
    if status.workers:
        parts += ["", *worker_table(status.workers)]
    return "\n".join(parts)


def headline(status: RunStatus) -> str:
    """Which run it is and how far."""
    facts = [f"run {status.run}"]
    facts += _said("step", status.step)
    facts += _said("version", status.weight_version)
    facts += _said("reward", status.reward_mean, ".3f")
    facts += _said("eval", status.eval_reward, ".3f")
    if status.staleness_mean is not None:
        bound = "" if status.max_staleness is None else f" (bound {status.max_staleness})"
        facts.append(f"staleness {status.staleness_mean:.2f}{bound}")
    rates = [(status.generated_tokens_per_s, "generated"), (status.tokens_per_s, "trained")]
    said = [f"{rate:,.0f} {what}" for rate, what in rates if rate]
    if said:
        facts.append(f"tokens/s in the last minute: {', '.join(said)}")
    if status.is_paused:
        facts.append("PAUSED")
    return "  ".join(facts)


def limit_line(status: RunStatus) -> str:
    """What holds it back."""
    limit = status.limit
    if limit.stage is None or status.is_paused:
        return limit.reason
    return f"{'BLOCKED by' if limit.is_blocked else 'limited by'} {limit.stage}: {limit.reason}"


def stream_table(streams: Mapping[Stream, Depth]) -> list[str]:
    """Lines: how many groups wait in each stream, how many are in work, and for how long."""
    rows = [
        (
            name.value,
            str(depth.length),
            str(depth.backlog),
            str(depth.pending),
            _age(depth.oldest_waiting_s),
            _age(depth.oldest_pending_s),
        )
        for name, depth in streams.items()
    ]
    return table(("stream", "groups", "waiting", "in work", "oldest waiting", "oldest in work"), rows)


def ledger_lines(status: RunStatus) -> list[str]:
    """Where all groups went."""
    ledger = status.ledger
    verdict = "" if status.ledger_balances else "   DOES NOT BALANCE"
    lines = [f"{ledger.equation}{verdict}"]
    extra = [f"uncommitted {ledger.uncommitted}"] if ledger.uncommitted else []
    extra += [f"refused {ledger.refused}"] if ledger.refused else []
    if ledger.eval_fed:
        extra.append(f"evaluation {ledger.eval_done} of {ledger.eval_fed}")
    return lines + (["  ".join(extra)] if extra else [])


def worker_table(workers: Sequence[WorkerInfo], *, has_address: bool = False) -> list[str]:
    """Lines: what each worker does; its rates are those of the last minute."""
    headers = ["worker", "state", "version", "groups/s", "tokens/s", "idle", "seen", "waits for"]
    rows = [
        (
            worker.worker_id,
            str(worker.status.get("state", "?")) if worker.is_alive else "LOST",
            _field(worker.status.get("weight_version"), "g"),
            _field(rates(worker).get("groups_per_s"), ".2f"),
            _field(rates(worker).get("tokens_per_s") or None, ",.0f"),
            _field(rates(worker).get("idle_ratio"), ".0%"),
            f"{worker.age_s:.0f} s ago",
            str(worker.status.get("waiting_for") or "") if worker.is_alive else "",
            *([worker.address] if has_address else []),
        )
        for worker in workers
    ]
    return table([*headers, *(["address"] if has_address else [])], rows)


def rates(worker: WorkerInfo) -> Mapping[str, Json]:
    """What a worker says of its last minute: nothing where it is gone, or passes no groups on."""
    return worker.status if worker.is_alive and worker.role != "exporter" else {}


def _said(name: str, value: float | None, form: str = "d") -> list[str]:
    return [] if value is None else [f"{name} {value:{form}}"]


def _field(value: Json, form: str) -> str:
    return f"{value:{form}}" if isinstance(value, (int, float)) else ""


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds else ""
