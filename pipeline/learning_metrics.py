"""Metrics of what the trainer learns: the last step's loss, how far it is from what generators sampled.

In: nothing. Out: declarations that `pipeline.metrics` continues. All are of the trainer; a gauge has
no value before the first step, and one of an age none before there was a token of that age.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.instruments import MetricTable, counter, gauges, late_gauge

_TRAINER = ("trainer",)

# Ages of which there are series; the last stands for itself and all above.
AGES = ("0", "1", "2", "3")
QUANTILES = {"0.01": "p01", "0.5": "p50", "0.99": "p99"}
CUTS = ("truncated", "masked")


class LearningMetrics(MetricTable):
    """Instruments of the optimiser's steps."""

    loss = late_gauge("loss", "Loss of the last step.", "Says little by itself in policy gradients.", roles=_TRAINER)
    grad_norm = late_gauge("norm", "Gradient norm before clipping.", "Spikes go before collapse.", roles=_TRAINER)
    learning_rate = late_gauge("rate", "Of the last step.", "As the schedule says.", roles=_TRAINER)
    entropy = late_gauge(
        "nats", "Mean over the last step's tokens.", "Near 0 the policy explores no more.", roles=_TRAINER
    )
    kl = late_gauge("nats", "Divergence from the initial policy; 0 without kl_coef.", "Grows slowly.", roles=_TRAINER)
    teacher_kl = late_gauge(
        "nats", "Divergence from the teacher; 0 without distillation_coef.", "What distillation lowers.", roles=_TRAINER
    )
    teacher_jsd = late_gauge(
        "nats", "Jensen-Shannon divergence from teachers; 0 without jsd_coef.", "What it lowers.", roles=_TRAINER
    )
    teacher_top_mass = late_gauge(
        "ratio",
        "Share of the teachers' probability on the top_k ids that they send; 0 without jsd_coef.",
        "Below 0.95 much of a teacher is one bucket: raise its top_k.",
        roles=_TRAINER,
    )
    effective_sample_size = late_gauge(
        "ratio",
        "Share of the tokens that the importance weights leave, 0 to 1.",
        "Below 0.5: half of what was generated counts for nothing.",
        roles=_TRAINER,
    )
    completion_length_mean = late_gauge(
        "tokens", "Mean length of the last step's completions.", "No drift that rewards do not explain.", roles=_TRAINER
    )
    zero_variance_groups_total = counter(
        "groups", "Trained groups whose rewards are all equal.", "They teach nothing; less than half.", roles=_TRAINER
    )
    importance_ratio_mean = late_gauge(
        "ratio", "Mean importance ratio of the last step.", "Far from 1: off-policy.", roles=_TRAINER
    )
    mismatch_kl = late_gauge(
        "nats", "Divergence of generator and trainer at the same token.", "Above 0.1: find out why.", roles=_TRAINER
    )
    mismatch_kl_fresh = late_gauge(
        "nats", "The same over tokens of the trainer's own version.", "Above 0.01: the engines differ.", roles=_TRAINER
    )
    mismatch_kl_stale = late_gauge(
        "nats", "The same over tokens of older versions.", "Grows with age and learning rate.", roles=_TRAINER
    )
    truncated_fraction = late_gauge(
        "ratio", "Share of tokens whose importance weight was cut.", "What is cut is bias: below 0.05.", roles=_TRAINER
    )
    masked_fraction = late_gauge(
        "ratio", "Share of tokens that the correction masked.", "Wasted generation: below 0.05.", roles=_TRAINER
    )
    clip_fraction = late_gauge(
        "ratio", "Share of tokens that were clipped.", "High: steps are too large or data too old.", roles=_TRAINER
    )
    rank_balance = late_gauge(
        "ratio",
        "With several ranks: mean over largest of their tokens in the last step.",
        "Near 1; below it ranks wait for the one that has most.",
        roles=_TRAINER,
    )
    skipped_steps_total = counter(
        "steps", "Steps whose update was not finite, or empty.", "Should stay at 0.", roles=_TRAINER
    )
    nonfinite_tokens_total = counter(
        "tokens", "Tokens masked for a value that is not finite.", "Should stay at 0.", roles=_TRAINER
    )
    forward_tokens_total = counter(
        "tokens", "Tokens that went through the model to be trained on.", "Padding is in it.", roles=_TRAINER
    )
    padding_tokens_total = counter(
        "tokens", "Padding that went through the model.", "0 unless the model takes padded rows.", roles=_TRAINER
    )
    shared_prompt_tokens_total = counter(
        "tokens", "Prompt tokens that went through once for several completions.", "What that saved.", roles=_TRAINER
    )
    masked_tokens_total = counter(
        "tokens", "Tokens kept out of the loss for their age.", "Wasted generation.", roles=_TRAINER
    )
    untaught_tokens_total = counter(
        "tokens",
        "Trained tokens of which no teacher has said anything, with distillation_coef or jsd_coef.",
        "0, unless rows have no teacher on purpose.",
        roles=_TRAINER,
    )
    importance_ratio_by_age = gauges(
        "age",
        "share",
        unit="ratio",
        help="Quantile of the importance ratio over tokens of one age; 3 is 3 and more.",
        reading="How far a version moves the policy: the outer ones spread with age.",
        roles=_TRAINER,
    )
    cut_fraction_by_age = gauges(
        "age",
        "cut",
        unit="ratio",
        help="Share of the tokens of one age whose weight was truncated, or that the correction masked.",
        reading="Which ages pay for the correction; near 1 they are generated for nothing.",
        roles=_TRAINER,
    )

    def observe_ages(self, row: Mapping[str, float]) -> None:
        """What a step's record says of the ages that it had tokens of."""
        for age in AGES:
            for share, name in QUANTILES.items():
                if (ratio := row.get(f"ratio_{name}_age_{age}")) is not None:
                    self.importance_ratio_by_age.labels(age=age, share=share).set(ratio)
            for cut in CUTS:
                if (fraction := row.get(f"{cut}_fraction_age_{age}")) is not None:
                    self.cut_fraction_by_age.labels(age=age, cut=cut).set(fraction)
