"""Every metric of a worker, declared once; `pipeline.weight_metrics` and `pipeline.learning_metrics` have their own.

In: a worker's name. Out: its instruments, one attribute each, on a registry of its own. Each
declaration says unit, meaning and how to read it: the table in docs/operations.md is made from
`Metrics.specs()` and `RUN_METRICS`, and no board or alert may name a metric that is not there.
"""

from __future__ import annotations

import socket

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, ProcessCollector

from pipeline import __version__
from pipeline.instruments import (
    count_histogram,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
    histograms,
    info,
    late_gauge,
)
from pipeline.keys import TAKEN_BY
from pipeline.learning_metrics import LearningMetrics
from pipeline.queues.ledger import DropReason
from pipeline.weight_metrics import WeightMetrics

_STAGES = tuple(TAKEN_BY.values())
_GENERATOR = ("generator",)
_JUDGES = ("scorer", "judge")
_TRAINER = ("trainer",)
_TOKEN_MAKERS = ("generator", "trainer")

SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
REWARDS = (-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1, 2, 5, 10)


class Metrics(LearningMetrics, WeightMetrics):
    """Instruments of one worker."""

    worker_info = info(
        "host", "version", help="What the worker is, in its labels.", reading="Join it to see a worker's machine."
    )
    waiting_seconds = gauge(
        "seconds",
        "Since this worker began to wait for what it says that it waits for; 0 when it does not.",
        "`rollstream workers` says what for.",
    )
    groups_in_total = counter(
        "groups",
        "Groups that this worker claimed.",
        "Its rate is the load; it stops when nothing arrives.",
        roles=_STAGES,
    )
    groups_out_total = counter(
        "groups",
        "Groups that this worker handed over, or trained.",
        "Rates of all stages agree in the long run, but for held-out groups, which are not trained.",
        roles=_STAGES,
    )
    groups_held = gauge(
        "groups",
        "Groups that this worker holds now.",
        "In work, or collected by the trainer for its next steps.",
        roles=_STAGES,
    )
    tokens_in_total = counter(
        "tokens", "Tokens of the groups that were claimed.", "Prompt tokens in a generator.", roles=_STAGES
    )
    tokens_out_total = counter(
        "tokens", "Tokens generated, or trained.", "Its rate is the throughput.", roles=_TOKEN_MAKERS
    )
    tokens_sampled_total = counter(
        "tokens",
        "Tokens drawn by the engine, also of groups that are not done yet.",
        "Its rate is the speed of the engine.",
        roles=_GENERATOR,
    )
    sequences_running = gauge(
        "sequences", "Completions that the engine works on.", "Compare with sequence_slots.", roles=_GENERATOR
    )
    sequence_slots = gauge(
        "sequences",
        "Completions that the engine can work on at once.",
        "generation.max_num_seqs; slots that stay free are unused speed.",
        roles=_GENERATOR,
    )
    tokens_carried_total = counter(
        "tokens",
        "Tokens taken over from generators that had to leave.",
        "Work that a drain did not cost.",
        roles=_GENERATOR,
    )
    tokens_wasted_total = counters(
        "reason",
        unit="tokens",
        help="Tokens generated and never trained, by reason.",
        reading="Generators: too_large, mismatch and stale (what a drain left), refused (the lease was lost). "
        "Trainer: why their group was dropped.",
        starts={"generator": ("too_large", "mismatch", "stale", "refused"), "trainer": tuple(DropReason)},
    )
    queue_wait_seconds = histogram(
        "seconds",
        "Time that a group lay in the queue in front of this stage.",
        "Long waits mean that this stage is too slow, none that the one before it is.",
        buckets=SECONDS,
        roles=_STAGES,
    )
    busy_seconds_total = counter(
        "seconds",
        "Time with at least one group in work.",
        "Its rate is the busy share of the worker, 0 to 1.",
        roles=_STAGES,
    )
    idle_seconds_total = counters(
        "cause",
        unit="seconds",
        help="Time without work, by cause.",
        reading="no_input: the stage before is slower; stale_weights: the weight channel is; output_full: the next is; "
        "paused: somebody asked for it.",
        starts={
            "generator": ("no_input", "stale_weights", "output_full", "paused"),
            "scorer": ("no_input", "output_full", "paused"),
            "teacher": ("no_input", "output_full", "paused"),
            "judge": ("no_input", "output_full", "paused"),
            "trainer": ("no_input", "paused"),
        },
    )
    device_wait_seconds_total = counter(
        "seconds",
        "Time spent waiting for the turn on a device that generation and training share.",
        "A generator's is about the time of training, the trainer's short; only with run.topology = colocated.",
        roles=_TOKEN_MAKERS,
    )
    refused_total = counter(
        "groups",
        "Results that came after the lease was lost.",
        "Wasted work: raise queues.lease_s, or find out what stalls the worker.",
        roles=_STAGES,
    )
    dead_letters_total = counters(
        "stage",
        unit="groups",
        help="Groups that no one can process, by the stream they were claimed from.",
        reading="Should stay at 0; `rollstream streams dead-letters` shows the reasons.",
        starts={role: (stream,) for stream, role in TAKEN_BY.items()},
    )
    dropped_total = counters(
        "reason",
        unit="groups",
        help="Groups that were not trained, by reason.",
        reading="Stale: generators are too far behind. Zero variance, out of range: prompts are too easy or too hard.",
        starts={"trainer": tuple(DropReason)},
    )
    reward_calls_total = counters(
        "function",
        "outcome",
        unit="completions",
        help="Completions judged by a reward function or a judge, by outcome.",
        reading="Errors and timeouts are not zeros: they leave the completion unscored.",
        roles=_JUDGES,
    )
    reward_value = histograms(
        "function",
        unit="reward",
        help="Values that a reward function or a judge gave.",
        reading="All in one bucket: the function tells nothing apart.",
        buckets=REWARDS,
        roles=_JUDGES,
    )
    reward_accumulated = gauges(
        "function",
        unit="reward",
        help="Sum of the values that a reward function gave; no counter, as rewards may be negative.",
        reading="Its `delta` over the increase of reward_value_count is the mean.",
        roles=_JUDGES,
    )
    reward_seconds = histograms(
        "function",
        unit="seconds",
        help="Time of one call of a reward function, or of a judge for one group.",
        reading="Compare with scoring.timeout_s.",
        buckets=SECONDS,
        roles=_JUDGES,
    )
    step = gauge("steps", "Optimiser steps done.", "Stands still: look at what limits the rate.", roles=_TRAINER)
    last_step_timestamp_seconds = late_gauge(
        "seconds",
        "Unix time of the last step, or of the trainer's start.",
        "`time()` minus it is how long nothing was trained.",
        roles=_TRAINER,
    )
    step_seconds = histogram(
        "seconds", "Time of one optimiser step.", "Without waiting for data.", buckets=SECONDS, roles=_TRAINER
    )
    reward_mean = late_gauge(
        "reward", "Mean reward of the last step's groups.", "What training is meant to raise.", roles=_TRAINER
    )
    eval_reward_mean = late_gauge(
        "reward", "Mean reward of the last evaluation.", "Held-out prompts; trust this one.", roles=_TRAINER
    )
    staleness_versions = count_histogram(
        "versions",
        "Age of trained tokens: the trainer's version minus the token's.",
        "Everything above staleness.max_staleness was corrected, masked or dropped.",
        buckets=VERSIONS,
        roles=_TRAINER,
    )
    group_age_seconds = histogram(
        "seconds",
        "From feeding a prompt to training its group.",
        "The latency of the whole loop.",
        buckets=SECONDS,
        roles=_TRAINER,
    )
    prompts_skipped_total = counter(
        "prompts", "Prompts longer than the context leaves.", "Shorten or filter them.", roles=_TRAINER
    )
    prompts_in_data = late_gauge("prompts", "Rows of the data set.", "What prompts_seen is a part of.", roles=_TRAINER)
    prompts_seen = late_gauge(
        "prompts",
        "Rows of which a group came back with rewards.",
        "All of them after one pass; what never gets there has no reward.",
        roles=_TRAINER,
    )
    prompts_always_solved = late_gauge(
        "prompts",
        "Rows whose last group was solved by every completion (data.solved_reward).",
        "They teach nothing any more: data.curriculum, or harder prompts.",
        roles=_TRAINER,
    )
    prompts_sometimes_solved = late_gauge(
        "prompts", "Rows whose last group was solved in part.", "What is learnt from.", roles=_TRAINER
    )
    prompts_never_solved = late_gauge(
        "prompts",
        "Rows whose last group earned nothing.",
        "Too hard as yet, or the reward cannot be earned.",
        roles=_TRAINER,
    )
    checkpoint_seconds = histogram(
        "seconds", "Time to write a checkpoint.", "Longer than it should be: the disk.", buckets=SECONDS, roles=_TRAINER
    )
    checkpoint_pause_seconds = histogram(
        "seconds",
        "Training stood still for a checkpoint.",
        "Copying what it holds; writing goes on beside the next steps.",
        buckets=SECONDS,
        roles=_TRAINER,
    )
    checkpoint_step = late_gauge(
        "steps", "Step of the newest checkpoint.", "What comes after it is lost with the trainer.", roles=_TRAINER
    )
    checkpoint_failures_total = counter(
        "checkpoints", "Checkpoints that could not be written.", "Should stay at 0: the disk.", roles=_TRAINER
    )
    redis_outages_total = counter("outages", "Times that Redis could not be reached.", "The run waits meanwhile.")

    def __init__(self, run: str, role: str, worker: str) -> None:
        super().__init__(CollectorRegistry(), {"run": run, "role": role, "worker": worker})
        ProcessCollector(registry=self.registry)
        self.worker_info.labels(host=socket.gethostname(), version=__version__).set(1)

    def observe_staleness(self, token_ages: npt.NDArray[np.int64]) -> None:
        """Count the ages of one completion's tokens, [T], in versions."""
        ages, counts = np.unique(token_ages, return_counts=True)
        for age, count in zip(ages.tolist(), counts.tolist(), strict=True):
            self.staleness_versions.observe(age, count)
