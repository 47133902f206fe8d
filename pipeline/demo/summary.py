"""What the demo did, in one flat object.

In: the run's records, what its workers last said, its ledger. Out: figures for people and scripts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.records.recorder import all_samples, read_metrics
from pipeline.streams import Ledger

_SHOWN = 3


def num_steps_of_a_part(config: Config) -> int | None:
    """Steps done by a run that was ended before there was anything to compare; None where it is whole."""
    rows = read_metrics(config.run_dir)
    num_steps = sum("reward_mean" in row for row in rows)
    is_whole = num_steps >= config.trainer.max_steps and any("eval_reward" in row for row in rows)
    return None if is_whole else num_steps


def summarise(
    config: Config, statuses: Mapping[str, tuple[str, Mapping[str, Any]]], ledger: Ledger | None, *, rl_wall_s: float
) -> dict[str, Any]:
    """The summary that `rollstream demo --json` prints.

    trainer_idle_ratio: share of the time between first and last step spent waiting for groups.
    mixed_completions: trained on, begun under one version of the weights and ended under another.
    generator_busy_ratio: mean share of time with a group in work, over generators.
    """
    rows = read_metrics(config.run_dir)
    steps = [row for row in rows if "reward_mean" in row]
    evaluations = [row for row in rows if "eval_reward" in row]
    waited = sum(row["waited_s"] for row in steps[1:])
    wall = sum(row["wall_s"] for row in steps[1:])
    busy = [
        status["busy_ratio"] for role, status in statuses.values() if role == "generator" and "busy_ratio" in status
    ]
    generated = [status.get("tokens_generated", 0) for role, status in statuses.values() if role == "generator"]
    return {
        "steps": len(steps),
        "eval_before": evaluations[0]["eval_reward"],
        "eval_after": evaluations[-1]["eval_reward"],
        "reward_first": steps[0]["reward_mean"],
        "reward_last": steps[-1]["reward_mean"],
        "rl_wall_s": round(rl_wall_s, 1),
        "tokens_generated": int(max(sum(generated), sum(row["tokens"] for row in steps))),
        "staleness_mean": statistics.fmean(row["staleness_mean"] for row in steps),
        "staleness_max": max(row["staleness_max"] for row in steps),
        "max_staleness": config.staleness.max_staleness,
        "tokens_over_max_staleness": int(sum(row["stale_tokens"] for row in steps)),
        "mixed_completions": int(sum(row["mixed_completions"] for row in steps)),
        "ledger": None if ledger is None else dataclasses.asdict(ledger),
        "ledger_balances": ledger is not None and ledger.balances,
        "trainer_idle_ratio": round(waited / wall, 4) if wall else None,
        "generator_busy_ratio": round(statistics.fmean(busy), 4) if busy else None,
        "workers": len(statuses),
        "run_dir": str(config.run_dir),
    }


def samples_before_and_after(run_dir: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Completions of the same held-out prompts under the first and the last weights."""
    first: dict[int, dict[str, Any]] = {}
    last: dict[int, dict[str, Any]] = {}
    for record in all_samples(run_dir):
        if record.get("is_evaluation") is not True:
            continue
        try:
            sample = {"prompt": record["prompt"], "text": record["completions"][0]["text"]}
            index = int(record["dataset_index"])
        except (KeyError, IndexError, TypeError, ValueError):
            continue  # a directory that was there before may hold records of another version
        first.setdefault(index, sample)
        last[index] = sample
    for index in sorted(first)[:_SHOWN]:
        yield first[index], last[index]
