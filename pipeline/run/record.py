"""What a run left in its directory, for when Redis no longer knows, or never is asked again.

In: a run's directory. Out: the state of the run as it was last recorded, in the form of any status.
It needs no server, and says nothing of a run that is going on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pipeline.prompts.statistics import Coverage
from pipeline.queues.ledger import Ledger
from pipeline.records.lines import number_in, step_of
from pipeline.records.recorder import last_metrics
from pipeline.run.limits import Limit, unfinished
from pipeline.run.predecessor import kept_settings
from pipeline.run.status import RunStatus

IDENTITY_FILE = "run.json"
_PROMPTS = tuple(Coverage(in_data=0, seen=0, always_solved=0, sometimes_solved=0, never_solved=0).describe())
_NAMES = ("reward_mean", "staleness_mean", "weight_version", "eval_reward", *_PROMPTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The end of a run, or where it was when it stopped.

    run: name. ended: why it is over; None where it may go on. step, values: of the last rows of
    metrics.jsonl. max_steps: of its last trainer; 0 where there is no bound, or it is not known. at: Unix
    seconds of the last row. ledger: None where the trainer could not say it.
    """

    run: str
    run_id: str | None
    ended: str | None
    step: int
    max_steps: int
    at: float
    values: dict[str, float]
    ledger: Ledger | None

    @property
    def progress(self) -> str:
        """How far it is."""
        return f"{self.step} of {self.max_steps} steps are done" if self.max_steps else f"{self.step} steps are done"


def read_record(run_dir: Path) -> RunRecord | None:
    """The record of a run; None where no step was recorded."""
    last = last_metrics(run_dir, _NAMES)
    if (step := step_of(last)) is None:
        return None
    identity = read_identity(run_dir)
    return RunRecord(
        run=str(identity.get("run", run_dir.name)),
        run_id=identity.get("run_id"),
        ended=identity.get("ended"),
        step=step,
        max_steps=_max_steps(run_dir),
        at=float(number_in(last, "time", 0.0)),
        values={name: float(last[name]) for name in _NAMES if isinstance(last.get(name), int | float)},
        ledger=_ledger(identity.get("ledger")),
    )


def as_status(record: RunRecord) -> RunStatus:
    """The record as the status of a run that nobody works at."""
    over = f"the run is over: {record.ended}"
    stopped = unfinished("nobody works at this run", record.progress)
    ledger = record.ledger or Ledger()
    return RunStatus(
        run=record.run,
        run_id=record.run_id,
        at=record.at,
        weight_version=_version(record),
        is_paused=False,
        stop_reason=record.ended,
        trainer=None,
        step=record.step,
        reward_mean=record.values.get("reward_mean"),
        eval_reward=record.values.get("eval_reward"),
        staleness_mean=record.values.get("staleness_mean"),
        max_staleness=None,
        tokens_per_s=None,
        generated_tokens_per_s=0.0,
        streams={},
        ledger=ledger,
        ledger_balances=ledger.balances,
        workers=(),
        limit=Limit(stage=None, reason=over if record.ended else stopped),
        redis_memory_bytes=None,
        redis_memory_max_bytes=None,
        prompts=Coverage.of(record.values),
    )


def complete(status: RunStatus, record: RunRecord) -> RunStatus:
    """A status without a trainer, with what the directory knows of the same run."""
    is_same = status.run_id is None or status.run_id == record.run_id
    is_alive = any(worker.is_alive and worker.role != "exporter" for worker in status.workers)
    if not is_same or status.step is not None or is_alive:
        return status
    recorded = as_status(record)
    if status.run_id is None:
        return recorded
    stopped = replace(status.limit, reason=unfinished("no worker is alive", record.progress))
    return replace(
        status,
        limit=status.limit if status.stop_reason else stopped,
        step=recorded.step,
        reward_mean=recorded.reward_mean,
        eval_reward=recorded.eval_reward,
        staleness_mean=recorded.staleness_mean,
        prompts=recorded.prompts,
    )


def read_identity(run_dir: Path) -> dict[str, Any]:
    """What the run's trainer has noted of it: `run.json`; empty where there is none."""
    try:
        stored = json.loads((run_dir / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _max_steps(run_dir: Path) -> int:
    found = json.loads(kept_settings(run_dir).get("trainer.max_steps", "0"))
    return found if isinstance(found, int) else 0


def _ledger(stored: object) -> Ledger | None:
    """None, too, where it holds anything but counts, and counts by reason."""
    if not isinstance(stored, dict):
        return None
    known = {field.name: stored[field.name] for field in fields(Ledger) if field.name in stored}
    counts = [count for value in known.values() for count in (value.values() if isinstance(value, dict) else [value])]
    return Ledger(**known) if all(isinstance(count, int) for count in counts) else None


def _version(record: RunRecord) -> int | None:
    version = record.values.get("weight_version")
    return None if version is None else int(version)
