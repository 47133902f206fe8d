"""What a trainer tells the world about each step: log line, records, trackers, metrics, status.

In: the step's groups and numbers. Out: one line to read, one row in metrics.jsonl, Prometheus
series and the status that `rollstream status` shows. It never influences training.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config import Config
from pipeline.evaluation import EvaluationReport
from pipeline.messages import ScoredGroup
from pipeline.pace import Pace
from pipeline.prompts import Coverage
from pipeline.records.recorder import LOST_FILE, Recorder
from pipeline.records.tracking import create_trackers
from pipeline.run.recovery import TrainerState
from pipeline.run.signal import SignalWatch
from pipeline.staleness import assess
from pipeline.streams import DropReason, Lease
from pipeline.worker.lifecycle import WorkerContext

# Fields of a row that are gauges of the same name.
_GAUGES = (
    "reward_mean",
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "kl",
    "teacher_kl",
    "teacher_jsd",
    "teacher_top_mass",
    "effective_sample_size",
    "completion_length_mean",
    "importance_ratio_mean",
    "mismatch_kl",
    "mismatch_kl_fresh",
    "mismatch_kl_stale",
    "clip_fraction",
    "truncated_fraction",
    "masked_fraction",
    "prompts_in_data",
    "prompts_seen",
    "prompts_always_solved",
    "prompts_sometimes_solved",
    "prompts_never_solved",
    "rank_balance",
)
# Fields of a row that are counted up.
_COUNTERS = (
    "forward_tokens",
    "padding_tokens",
    "shared_prompt_tokens",
    "nonfinite_tokens",
    "masked_tokens",
    "untaught_tokens",
    "skipped_steps",
    "zero_variance_groups",
)


class Progress:
    """Reports one trainer's steps."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self._context = context
        self._config = config
        self._recorder = Recorder(config.run_dir, "trainer")
        self._pace = Pace()
        self._signal = SignalWatch()
        self._trackers = create_trackers(
            config.tracking, config.run_dir, config.run.name, config.model_dump(mode="json")
        )
        self._started = time.monotonic()
        self._last_step_at = self._started
        self._dropped: Counter[DropReason] = Counter()
        self._num_skipped = 0
        self._counted_groups: Counter[DropReason] = Counter()
        self._counted_tokens: Counter[DropReason] = Counter()
        context.metrics.last_step_timestamp_seconds.set_to_current_time()

    def goes_on_from(self, step: int) -> None:
        """Training begins, or goes on from a checkpoint; later steps are done again."""
        self._context.set_status(step=step)
        num_records = self._recorder.rewind(step)
        if num_records:
            self._context.log.info("records_set_aside", num_records=num_records, after_step=step, file=LOST_FILE)

    def step(
        self,
        state: TrainerState,
        groups: Sequence[ScoredGroup],
        metrics: Mapping[str, float],
        *,
        trainer_version: int,
        waited_s: float,
        step_s: float,
        dropped: Counter[DropReason],
        coverage: Coverage,
    ) -> None:
        """One optimiser step is done. trainer_version: of the weights that were trained, before the step.

        coverage: of the data set, this step included.
        """
        row = self._row(state, groups, metrics, waited_s=waited_s, step_s=step_s, dropped=dropped)
        row |= coverage.describe()
        self._recorder.metrics(state.step, row)
        self._recorder.samples(state.step, groups[: self._config.tracking.samples_per_step])
        for tracker in self._trackers:
            tracker.log(state.step, row)
        dropped_now = dropped - self._dropped
        self._observe(state, groups, row, trainer_version)
        self._dropped = dropped.copy()
        self._pace.step(groups, ended_at=self._last_step_at, wall_s=row["wall_s"], waited_s=waited_s)
        pace = self._pace.describe()
        self._context.set_status(
            step=state.step,
            reward_mean=row.get("reward_mean"),
            staleness_mean=row.get("staleness_mean"),
            max_staleness=self._config.staleness.max_staleness,
            **coverage.describe(),
            **pace,
        )
        self._context.log.info(
            "step",
            step=state.step,
            reward=_rounded(row.get("reward_mean")),
            tokens_per_s=round(row["tokens_per_s"]),
            staleness=_rounded(row.get("staleness_mean")),
            unscored=round(row.get("unscored_completions", 0.0)),
            dropped={reason.value: count for reason, count in dropped_now.items()},
            weight_version=state.version,
            limited_by=pace["limited_by"],
        )
        if num_steps := self._signal.step(row):
            self._context.log.warning(
                "nothing_learnt",
                steps=num_steps,
                reason="in no group of these steps did the rewards differ, so that all advantages were 0",
                way_out="prompts that are neither solved nor failed every time, algorithm.drop_zero_variance = true, "
                "or a finer reward",
            )

    def _row(
        self,
        state: TrainerState,
        groups: Sequence[ScoredGroup],
        metrics: Mapping[str, float],
        *,
        waited_s: float,
        step_s: float,
        dropped: Mapping[DropReason, int],
    ) -> dict[str, float]:
        """What the learner says of the step, and what only the loop knows."""
        now = time.monotonic()
        wall_s, self._last_step_at = now - self._last_step_at, now
        tokens = sum(len(completion) for group in groups for completion in group.rollout.completions)
        return {
            **metrics,
            "weight_version": float(state.version),
            "groups": float(len(groups)),
            "tokens": float(tokens),
            "step_s": step_s,
            "waited_s": waited_s,
            "wall_s": wall_s,
            "run_s": now - self._started,
            "tokens_per_s": tokens / max(wall_s, 1e-9),
            "prompts_skipped": float(self._num_skipped),
            **{f"dropped_{reason.value}": float(count) for reason, count in dropped.items()},
        }

    def _observe(
        self,
        state: TrainerState,
        groups: Sequence[ScoredGroup],
        row: Mapping[str, float],
        trainer_version: int,
    ) -> None:
        metrics = self._context.metrics
        metrics.step.set(state.step)
        metrics.last_step_timestamp_seconds.set_to_current_time()
        metrics.step_seconds.observe(row["step_s"])
        metrics.groups_in_total.inc(len(groups))
        metrics.groups_out_total.inc(len(groups))
        metrics.tokens_in_total.inc(row["tokens"])
        metrics.tokens_out_total.inc(row["tokens"])
        for name in _COUNTERS:
            getattr(metrics, f"{name}_total").inc(row.get(name, 0.0))
        for name in _GAUGES:
            if name in row:
                getattr(metrics, name).set(row[name])
        metrics.observe_ages(row)
        now = time.time()
        for group in groups:
            metrics.group_age_seconds.observe(max(0.0, now - group.rollout.prompt.hops.get("fed", now)))
            for ages in assess(group, trainer_version, self._config.staleness).token_ages:
                for age, count in zip(*np.unique(ages, return_counts=True), strict=True):
                    metrics.staleness_versions.observe(float(age), int(count))

    def dropped(self, groups: Counter[DropReason], tokens: Counter[DropReason]) -> None:
        """So many groups, with so many tokens, were dropped so far: also while no step is done."""
        metrics = self._context.metrics
        for reason, count in (groups - self._counted_groups).items():
            metrics.dropped_total.labels(reason=reason.value).inc(count)
        for reason, count in (tokens - self._counted_tokens).items():
            metrics.tokens_wasted_total.labels(reason=reason.value).inc(count)
        self._counted_groups, self._counted_tokens = groups.copy(), tokens.copy()

    def evaluation(self, step: int, report: EvaluationReport) -> None:
        """One evaluation round is complete."""
        row = report.as_metrics()
        self._recorder.metrics(step, row)
        self._recorder.samples(step, report.samples)
        for tracker in self._trackers:
            tracker.log(step, row)
        self._context.metrics.eval_reward_mean.set(report.reward_mean)
        is_partial = report.num_scored < report.num_completions
        self._context.set_status(eval_reward=report.reward_mean, eval_weight_version=report.weight_version_max)
        self._context.log.info(
            "evaluation",
            step=step,
            weight_version=report.weight_version_max,
            reward=_rounded(report.reward_mean),
            prompts=report.num_groups,
            **({"scored": f"{report.num_scored}/{report.num_completions}"} if is_partial else {}),
            rewards={name: _rounded(value) for name, value in report.rewards.items()},
        )

    def prompts_skipped(self, number: int, max_prompt_tokens: int) -> None:
        """So many prompts, in all, were passed over because they are too long."""
        if number == self._num_skipped:
            return
        if self._num_skipped == 0:
            self._context.log.warning("prompts_skipped", max_prompt_tokens=max_prompt_tokens, so_far=number)
        self._context.metrics.prompts_skipped_total.inc(number - self._num_skipped)
        self._context.set_status(prompts_skipped=number)
        self._num_skipped = number

    def dead_letter(self, lease: Lease, reason: str) -> None:
        """A scored group that cannot be read or trained was set aside."""
        self._context.log.warning("dead_letter", group_id=lease.group_id, reason=reason)
        self._context.metrics.dead_letters_total.labels(stage=lease.stream.value).inc()

    def drop(self, step: int, group_ids: Sequence[str], reason: DropReason) -> None:
        """Groups are about to be dropped while the step after `step` is being filled."""
        self._recorder.dropped(step, group_ids, reason.value)

    def close(self) -> None:
        """Flush records and trackers."""
        self._recorder.close()
        for tracker in self._trackers:
            tracker.close()


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
