"""Every field of metrics.jsonl: its unit, what it means, and what is healthy.

In: nothing. Out: the table in docs/operations.md, which `python -m pipeline.records.fields` prints.
A field that a run writes and this table lacks fails a test, and so does one that no run writes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.queues.ledger import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordField:
    """One field. healthy: where it should be, or how to read it. is_occasional: only in some rows of some runs."""

    name: str
    unit: str
    meaning: str
    healthy: str
    is_occasional: bool = False


def _field(name: str, unit: str, meaning: str, healthy: str, *, is_occasional: bool = False) -> RecordField:
    return RecordField(name=name, unit=unit, meaning=meaning, healthy=healthy, is_occasional=is_occasional)


_ROW = (
    _field("step", "steps", "optimiser steps done, this one included", "rises by one"),
    _field("time", "Unix seconds", "when the row was written", ""),
    _field("role", "", "kind of worker that wrote it", "trainer"),
)
_REWARDS = (
    _field("reward_mean", "reward", "mean over the step's completions, sampled at the temperature", "rises"),
    _field("reward_std", "reward", "spread over the step's completions", "above 0; at 0 nothing is learnt"),
    _field("unscored_completions", "completions", "without a reward: None, failed, timed out", "0"),
    _field("unscored_groups", "groups", "in which no completion has a reward", "0"),
    _field("zero_variance_groups", "groups", "whose rewards are all equal: no gradient", "less than half"),
    _field("advantage_mean", "", "mean advantage", "near 0"),
    _field("advantage_abs_mean", "", "mean size of the advantages", "up to 1 with group_mean_std"),
    _field("overlong_completions", "completions", "that lost reward for their length", "few; 0 without overlong"),
)
_SIZES = (
    _field("groups", "groups", "in the step", "trainer.groups_per_step"),
    _field("completions", "completions", "in the step", "groups x generation.group_size"),
    _field("tokens", "tokens", "of the completions", ""),
    _field("trained_tokens", "tokens", "that were in the loss", "near tokens"),
    _field("forward_tokens", "tokens", "that went through the model, padding included", "below prompts and tokens"),
    _field("padding_tokens", "tokens", "of those, padding", "0; above it the model takes padded rows"),
    _field("shared_prompt_tokens", "tokens", "of prompts, that went through once for several completions", ""),
    _field("completion_length_mean", "tokens", "mean length", "no drift that rewards do not explain"),
    _field("completion_length_max", "tokens", "longest", "below generation.max_tokens, or many are cut off"),
    _field("prompts_skipped", "prompts", "so far, longer than the context leaves", "0"),
)
_PROMPTS = (
    _field("prompts_in_data", "prompts", "rows of the data set", ""),
    _field("prompts_seen", "prompts", "rows of which a group came back with rewards", "rises to prompts_in_data"),
    _field("prompts_always_solved", "prompts", "rows whose last group earned data.solved_reward", "rises"),
    _field("prompts_sometimes_solved", "prompts", "rows whose last group earned a part of it", "not 0: it teaches"),
    _field("prompts_never_solved", "prompts", "rows whose last group earned nothing", "falls"),
)
_AGES = (
    _field("staleness_mean", "versions", "mean age of the tokens", "up to staleness.max_staleness"),
    _field("staleness_max", "versions", "age of the oldest token", "max_staleness; above it now and then with correct"),
    _field("mixed_completions", "completions", "begun under one version, ended under another", "any number"),
    _field("stale_tokens", "tokens", "older than staleness.max_staleness", "a few percent"),
    _field("corrected_tokens", "tokens", "of those, left to the correction", "stale_tokens with correct"),
    _field("masked_tokens", "tokens", "of those, kept out of the loss", "stale_tokens with mask"),
)
_LEARNING = (
    _field("loss", "", "of the step", "says little; no trend is needed"),
    _field("grad_norm", "", "before clipping", "steady; spikes go before collapse"),
    _field("learning_rate", "", "of the step", "as the schedule says"),
    _field("skipped_steps", "steps", "1 where the update was not finite, or nothing was there to train", "0"),
    _field("entropy", "nats", "mean over tokens", "falls slowly; near 0 the policy explores no more"),
    _field("kl", "nats", "divergence from the initial policy; 0 without kl_coef", "grows slowly"),
    _field("teacher_kl", "nats", "divergence from the teacher, at its tokens; 0 without distillation_coef", "falls"),
    _field("teacher_jsd", "nats", "Jensen-Shannon divergence from teachers; 0 without jsd_coef", "falls"),
    _field("teacher_top_mass", "0 to 1", "of the teachers' probability, on the top_k ids they send", "above 0.95"),
)
_MISMATCH = (
    _field("importance_ratio_mean", "", "trainer's over generator's probability", "0.9 to 1.1"),
    _field("importance_ratio_max", "", "largest of the step", "below 10, or look at mismatch_kl"),
    _field("mismatch_kl", "nats", "divergence of trainer from generator", "below 0.01; above 0.1 find out why"),
    _field(
        "mismatch_kl_fresh", "nats", "the same over tokens of the trainer's own version", "near 0, or engines differ"
    ),
    _field("mismatch_kl_stale", "nats", "the same over older tokens", "grows with age and learning rate"),
    _field("effective_sample_size", "0 to 1", "share of the tokens that the importance weights leave", "above 0.9"),
    _field("clip_fraction", "0 to 1", "tokens at the clip; 0 where proximal is recomputed", "below 0.2"),
    _field("truncated_fraction", "0 to 1", "tokens whose weight was cut to truncation", "below 0.05"),
    _field("masked_fraction", "0 to 1", "tokens that the correction masked: mis, icepop, m2po and so on", "below 0.05"),
    _field("nonfinite_tokens", "tokens", "masked because a number was impossible", "0"),
    _field("unreplayed_tokens", "tokens", "cut by top-p or top-k without a mask to replay", "0"),
    _field("unrouted_tokens", "tokens", "trained without a record of the experts to replay", "0"),
    _field("untaught_tokens", "tokens", "of which no teacher has said anything, with one to learn from", "0"),
)
_BY_AGE = tuple(
    _field(
        name.format(age=age),
        unit,
        f"{meaning}, of age {age}{' and more' if age == 3 else ''}",
        healthy,
        is_occasional=True,
    )
    for age in range(4)
    for name, unit, meaning, healthy in (
        ("tokens_age_{age}", "tokens", "in the loss", "few above staleness.max_staleness"),
        ("truncated_fraction_age_{age}", "0 to 1", "tokens whose weight was cut", "rises with age"),
        ("masked_fraction_age_{age}", "0 to 1", "tokens that the correction masked", "rises with age"),
        ("teacher_kl_age_{age}", "nats", "divergence from the teacher", "falls with training"),
        ("ratio_p01_age_{age}", "", "importance ratio that 1 % of the tokens are below", "above 0.1"),
        ("ratio_p50_age_{age}", "", "median of the importance ratio", "near 1"),
        ("ratio_p99_age_{age}", "", "importance ratio that 1 % of the tokens are above", "below truncation"),
    )
)
_TIMES = (
    _field("weight_version", "version", "of the weights after the step", "rises"),
    _field(
        "rank_balance",
        "0 to 1",
        "with several ranks: mean over largest of their tokens",
        "near 1; below, some wait for others",
        is_occasional=True,
    ),
    _field("step_s", "s", "forward, backward and update", ""),
    _field("waited_s", "s", "waiting for groups", "below a fifth of wall_s: the trainer is busy"),
    _field("wall_s", "s", "since the step before", ""),
    _field("run_s", "s", "since the trainer started", ""),
    _field("tokens_per_s", "tokens/s", "tokens over wall_s, of this step alone", ""),
)
_DROPPED = tuple(
    _field(f"dropped_{reason.value}", "groups", f"so far, dropped as {reason.value}", "0", is_occasional=True)
    for reason in DropReason
)
_EVALUATION = (
    _field("eval_reward", "reward", "mean over held-out completions, greedy unless set", "rises; trust this one"),
    _field("eval_weight_version", "version", "newest that generated them", ""),
    _field("eval_weight_version_min", "version", "oldest that generated them", "near eval_weight_version"),
    _field("eval_num_scored", "completions", "that have a reward", "all held-out ones"),
    _field("eval_num_completions", "completions", "of the held-out prompts", ""),
    _field("eval_rewards", "reward", "an object: the mean of each reward function, by its name", ""),
)

FIELDS = (
    *_ROW,
    *_REWARDS,
    *_SIZES,
    *_PROMPTS,
    *_AGES,
    *_LEARNING,
    *_MISMATCH,
    *_BY_AGE,
    *_TIMES,
    *_DROPPED,
    *_EVALUATION,
)


def render_table() -> str:
    """The fields as a Markdown table."""
    lines = ["| field | unit | meaning | healthy |", "|---|---|---|---|"]
    lines += [f"| `{field.name}` | {field.unit} | {field.meaning} | {field.healthy} |" for field in FIELDS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_table())
