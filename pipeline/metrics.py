"""Every metric of rollstream, declared once.

In: a worker's name. Out: its instruments, one attribute each, on a registry of its own. Each
declaration says unit, meaning and how to read it; documents and dashboards are made from
`Metrics.specs()` and `RUN_METRICS`. Nothing else in rollstream names a metric.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, ProcessCollector

from pipeline.instruments import (
    MetricTable,
    count_histogram,
    counter,
    counters,
    gauge,
    histogram,
    histograms,
)

_STAGES = ("generator", "scorer", "trainer")
_GENERATOR = ("generator",)
_TRAINER = ("trainer",)
_CHANNEL = ("generator", "trainer")

SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
REWARDS = (-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1, 2, 5, 10)


class Metrics(MetricTable):
    """Instruments of one worker."""

    groups_in_total = counter(
        "groups",
        "Groups that this worker claimed.",
        "Its rate is the load; it stops when nothing arrives.",
        roles=_STAGES,
    )
    groups_out_total = counter(
        "groups",
        "Groups that this worker handed over, or trained.",
        "The stage with the lowest rate limits the run; rates of all stages agree in the long run.",
        roles=_STAGES,
    )
    tokens_in_total = counter(
        "tokens", "Tokens of the groups that were claimed.", "Prompt tokens in a generator.", roles=_STAGES
    )
    tokens_out_total = counter("tokens", "Tokens generated, or trained.", "Its rate is the throughput.", roles=_CHANNEL)
    tokens_carried_total = counter(
        "tokens",
        "Tokens taken over from generators that had to leave.",
        "Work that a drain did not cost.",
        roles=("generator",),
    )
    tokens_wasted_total = counters(
        "reason",
        unit="tokens",
        help="Tokens generated and not passed on, by reason.",
        reading="too_large: raise queues.max_payload_bytes; stale: too old to be trained; mismatch: of another prompt.",
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
        "Time spent on groups, summed over the groups in work.",
        "Its rate is the mean number in work.",
        roles=_STAGES,
    )
    idle_seconds_total = counters(
        "cause",
        unit="seconds",
        help="Time without work, by cause.",
        reading="no_input: the stage before is slower; stale_weights: the weight channel is; output_full: the next is.",
    )
    device_wait_seconds_total = counter(
        "seconds",
        "Time spent waiting for the turn on a device that generation and training share.",
        "A generator's is about the time of training, the trainer's short; only with run.topology = colocated.",
        roles=_CHANNEL,
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
    )
    dropped_total = counters(
        "reason",
        unit="groups",
        help="Groups that were not trained, by reason.",
        reading="Stale: generators are too far behind. Zero variance: prompts are too easy or too hard.",
    )
    reward_calls_total = counters(
        "function",
        "outcome",
        unit="completions",
        help="Completions judged by a reward function, by outcome.",
        reading="Errors and timeouts are not zeros: they leave the completion unscored.",
    )
    reward_value = histograms(
        "function",
        unit="reward",
        help="Values that a reward function gave.",
        reading="All in one bucket: the function tells nothing apart.",
        buckets=REWARDS,
    )
    reward_seconds = histograms(
        "function",
        unit="seconds",
        help="Time of one call of a reward function.",
        reading="Compare with scoring.timeout_s.",
        buckets=SECONDS,
    )
    weight_version = gauge(
        "version", "Weights that this worker serves or has made.", "Generators trail the trainer.", roles=_CHANNEL
    )
    weight_bytes_total = counter(
        "bytes", "Sent over the weight channel, or received.", "Its rate is the load of the line.", roles=_CHANNEL
    )
    weight_content_bytes_total = counter(
        "bytes",
        "Size of the versions received.",
        "Many times weight_bytes_total: only what changed is sent.",
        roles=_GENERATOR,
    )
    weight_patched_total = counter(
        "versions", "Versions of which only what changed was sent.", "The others came whole.", roles=_GENERATOR
    )
    weight_failures_total = counter(
        "versions",
        "Weights that failed verification or did not fit.",
        "Should stay at 0; the old version goes on.",
        roles=_GENERATOR,
    )
    weight_skipped_total = counter(
        "versions",
        "Versions overtaken by a newer one before they were fetched.",
        "High: the channel is slow.",
        roles=_GENERATOR,
    )
    weight_receive_seconds = histogram(
        "seconds", "From the manifest to the last piece.", "While serving goes on.", buckets=SECONDS, roles=_GENERATOR
    )
    weight_verify_seconds = histogram(
        "seconds",
        "Hashing, copying and patching of one version.",
        "While serving goes on.",
        buckets=SECONDS,
        roles=_GENERATOR,
    )
    weight_apply_seconds = histogram(
        "seconds",
        "From verified weights to the new version serving.",
        "Part of it is the pause.",
        buckets=SECONDS,
        roles=_GENERATOR,
    )
    weight_pause_seconds = histogram(
        "seconds", "Generation stood still for an update.", "Lost generation time.", buckets=SECONDS, roles=_GENERATOR
    )
    weight_publish_seconds = histogram(
        "seconds",
        "Copy and encoding of a version by the trainer.",
        "Delays the next step.",
        buckets=SECONDS,
        roles=_TRAINER,
    )
    step = gauge("steps", "Optimiser steps done.", "Stands still: look at what limits the rate.", roles=_TRAINER)
    step_seconds = histogram(
        "seconds", "Time of one optimiser step.", "Without waiting for data.", buckets=SECONDS, roles=_TRAINER
    )
    reward_mean = gauge(
        "reward", "Mean reward of the last step's groups.", "What training is meant to raise.", roles=_TRAINER
    )
    eval_reward_mean = gauge(
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
    loss = gauge("loss", "Loss of the last step.", "Says little by itself in policy gradients.", roles=_TRAINER)
    grad_norm = gauge("norm", "Gradient norm before clipping.", "Spikes go before collapse.", roles=_TRAINER)
    importance_ratio_mean = gauge(
        "ratio", "Mean importance ratio of the last step.", "Far from 1: off-policy.", roles=_TRAINER
    )
    mismatch_kl = gauge(
        "nats", "Divergence of generator and trainer at the same token.", "Above 0.1: find out why.", roles=_TRAINER
    )
    clip_fraction = gauge(
        "ratio", "Share of tokens that were clipped.", "High: steps are too large or data too old.", roles=_TRAINER
    )
    nonfinite_tokens_total = counter(
        "tokens", "Tokens masked for a value that is not finite.", "Should stay at 0.", roles=_TRAINER
    )
    masked_tokens_total = counter(
        "tokens", "Tokens kept out of the loss for their age.", "Wasted generation.", roles=_TRAINER
    )
    prompts_skipped_total = counter(
        "prompts", "Prompts longer than the context leaves.", "Shorten or filter them.", roles=_TRAINER
    )
    checkpoint_seconds = histogram(
        "seconds", "Time to write a checkpoint.", "Longer than it should be: the disk.", buckets=SECONDS, roles=_TRAINER
    )
    redis_outages_total = counter("outages", "Times that Redis could not be reached.", "The run waits meanwhile.")

    def __init__(self, run: str, role: str, worker: str) -> None:
        super().__init__(CollectorRegistry(), {"run": run, "role": role, "worker": worker})
        ProcessCollector(registry=self.registry)

    def observe_staleness(self, token_ages: npt.NDArray[np.int64]) -> None:
        """Count the ages of one completion's tokens, [T], in versions."""
        ages, counts = np.unique(token_ages, return_counts=True)
        for age, count in zip(ages.tolist(), counts.tolist(), strict=True):
            self.staleness_versions.observe(age, count)
