"""What it gains that generation and training run at the same time, against the most that it can gain.

Whole runs with the scripted engine and the scripted trainer, which take as long as they are told;
lengths are log-normal. A synchronous run (max_staleness = 0) waits in every step for the slowest
completion of the batch and then for the trainer; one that overlaps them takes as long as the slower
of the two, the generators' work spread over all their slots or the trainer. So at most

    (E[slowest of the batch] + step) / max(mean work / slots, step)

can be gained. Both expectations are taken over the batches that were really drawn.

    python -m benchmarks.overlap --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import report
from pipeline.config import Config
from pipeline.local.crew import Crew
from pipeline.local.run import LocalRun
from pipeline.queues.ledger import Ledger
from pipeline.records.recorder import read_metrics
from pipeline.settings.files import load_config

_GROUP_SIZE, _GROUPS_PER_STEP, _SLOTS = 4, 16, 64
_LENGTH_MEAN, _LONGEST = 64, 4096
_CAPACITY, _FAST_CAPACITY, _FAST_SIGMA = 1.1, 2.5, 0.5
_MAX_STALENESS = 4
_WARM_UP = 6
SIGMAS = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is measured. sigmas: of the lengths. step_s: of the trainer. num_sync, num_async: steps that count."""

    sigmas: Sequence[float]
    step_s: float
    num_sync: int
    num_async: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run over the steps that count. Seconds are for one step; slowest_s and work_s as drawn, without waiting."""

    wall_s: float
    slowest_s: float
    work_s: float
    idle_ratio: float
    staleness_mean: float
    ledger: Ledger


def overlap(load: Load) -> dict[str, float]:
    """All results."""
    results: dict[str, float] = {}
    idle: list[float] = []
    for sigma in load.sigmas:
        name = f"sigma_{sigma:g}".replace(".", "")
        synchronous = run(load, sigma, max_staleness=0, capacity=_CAPACITY)
        ahead = run(load, sigma, max_staleness=_MAX_STALENESS, capacity=_CAPACITY)
        speedup = synchronous.wall_s / ahead.wall_s
        bound = (synchronous.slowest_s + load.step_s) / max(ahead.work_s, load.step_s)
        idle.append(ahead.idle_ratio)
        results |= {
            f"speedup_vs_bound_{name}": speedup / bound,
            f"speedup_{name}": speedup,
            f"bound_{name}": bound,
            f"synchronous_vs_drawn_{name}": synchronous.wall_s / (synchronous.slowest_s + load.step_s),
            f"step_vs_trainer_{name}": ahead.wall_s / load.step_s,
            f"trainer_idle_ratio_{name}": ahead.idle_ratio,
            f"staleness_mean_{name}": ahead.staleness_mean,
        }
    fast = run(load, _FAST_SIGMA, max_staleness=_MAX_STALENESS, capacity=_FAST_CAPACITY, policy="drop")
    results |= {
        "trainer_idle_ratio": max(idle),
        "stale_drop_ratio": fast.ledger.dropped.get("stale", 0) / fast.ledger.fed,
        "stale_drop_staleness_mean": fast.staleness_mean,
    }
    return {name: round(value, 4) for name, value in results.items()} | {"step_s": load.step_s}


def run(load: Load, sigma: float, *, max_staleness: int, capacity: float, policy: str = "correct") -> Measured:
    """One whole run in processes of its own. capacity: of the generator over the trainer's."""
    mean_s = load.step_s / capacity * _SLOTS / (_GROUPS_PER_STEP * _GROUP_SIZE)
    tokens_per_s = _LENGTH_MEAN / mean_s
    is_ahead = max_staleness > 0
    first, num_steps = (_WARM_UP, load.num_async) if is_ahead else (1, load.num_sync)
    # The last steps get no new groups behind them and wait for the slowest.
    last = first + num_steps
    with tempfile.TemporaryDirectory() as folder:
        config = _config(
            Path(folder),
            f"generation.scripted.length_sigma={sigma}",
            f"generation.scripted.tokens_per_s={tokens_per_s}",
            f"trainer.scripted_step_s={load.step_s}",
            f"trainer.max_steps={last + max_staleness + 1}",
            f"staleness.max_staleness={max_staleness}",
            f"staleness.policy='{policy}'",
        )
        ledger = asyncio.run(_until_done(config))
        rows = [row for row in read_metrics(config.run_dir) if "groups" in row]
    return _measured(rows[first : last + 1], ledger, tokens_per_s)


def _measured(rows: Sequence[Mapping[str, float]], ledger: Ledger, tokens_per_s: float) -> Measured:
    counted, num_steps = rows[1:], len(rows) - 1
    return Measured(
        wall_s=(rows[-1]["run_s"] - rows[0]["run_s"]) / num_steps,
        slowest_s=statistics.fmean(row["completion_length_max"] for row in counted) / tokens_per_s,
        work_s=statistics.fmean(row["tokens"] for row in counted) / tokens_per_s / _SLOTS,
        idle_ratio=sum(row["waited_s"] for row in counted) / sum(row["wall_s"] for row in counted),
        staleness_mean=statistics.fmean(row["staleness_mean"] for row in counted),
        ledger=ledger,
    )


async def _until_done(config: Config) -> Ledger:
    with LocalRun(config, Crew(has_exporter=False), persist=False) as local:
        lines: list[str] = []
        code = await local.run(local.supervisor(lambda name, line: lines.append(f"{name}: {line}")), lines.append)
        ledger = await local.ledger()
    if code != 0 or ledger is None or not ledger.balances:
        raise SystemExit("\n".join([*lines[-20:], f"the run ended with {code}, {ledger}"]))
    return ledger


def _config(directory: Path, *overrides: str) -> Config:
    settings = (
        "run.name='overlap'",
        f"run.dir={json.dumps(str(directory))}",
        "generation.engine='scripted'",
        f"generation.group_size={_GROUP_SIZE}",
        f"generation.max_num_seqs={_SLOTS}",
        f"generation.max_tokens={_LONGEST}",
        f"generation.scripted.length_mean={_LENGTH_MEAN}",
        f"trainer.groups_per_step={_GROUPS_PER_STEP}",
        "scoring.rewards=[{function='length', kwargs={at_most=32, slack=64}}]",
        "scoring.num_processes=1",
        "checkpoint.every_steps=0",
        "tracking.samples_per_step=0",
        "worker.log_level='warning'",
    )
    return load_config([], environ={}, overrides=[*settings, *overrides])


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--sigmas", type=float, nargs="+", default=SIGMAS, help="spread of the log-normal lengths")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds that a step of the trainer takes")
    parser.add_argument("--sync-steps", type=int, default=6, help="synchronous steps that count")
    parser.add_argument("--async-steps", type=int, default=16, help="steps that count where both run at once")
    arguments = parser.parse_args()
    if arguments.step_s <= 0 or min(arguments.sync_steps, arguments.async_steps) < 1 or min(arguments.sigmas) < 0:
        sys.exit("error: --step-s, --sync-steps and --async-steps are above 0, --sigmas are not below")
    load = Load(
        sigmas=arguments.sigmas,
        step_s=arguments.step_s,
        num_sync=arguments.sync_steps,
        num_async=arguments.async_steps,
    )
    report("overlap", overlap(load), as_json=arguments.json)


if __name__ == "__main__":
    main()
