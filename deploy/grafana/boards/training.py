"""The trainer: what it is given, how fast it steps, what it learns, what it keeps."""

from __future__ import annotations

from deploy.grafana.board import Board, Row
from deploy.grafana.boards.process import processes
from deploy.grafana.boards.promql import RUN, TRAINER, average, buckets, quantile, run_value, stream, total
from deploy.grafana.panels import RATIO, SECONDS, Limits, Query, graph, heat, tile

_TILES = (
    tile("Step", run_value("step"), "Optimiser steps done.", decimals=0),
    tile(
        "Since the last step",
        f"time() - {run_value('last_step_timestamp_seconds')}",
        "Much more than a step takes: the trainer waits, or is stuck.",
        unit=SECONDS,
        decimals=0,
    ),
    tile("Step time", average("step_seconds", TRAINER), "Without waiting for data.", unit=SECONDS, decimals=2),
    tile(
        "Waiting for groups",
        total("idle_seconds_total", f'{TRAINER}, cause="no_input"'),
        "Share of the time. Above a fifth, generation or scoring is the slower one.",
        unit=RATIO,
        decimals=0,
        limits=Limits(0.2, 0.5),
    ),
    tile("Reward", run_value("reward_mean"), "Of the last step's groups.", decimals=3),
    tile("Held-out reward", run_value("eval_reward_mean"), "Of the last evaluation: trust this one.", decimals=3),
    tile(
        "Mismatch KL",
        run_value("mismatch_kl"),
        "Of generator and trainer at the same token, in nats. Above 0.1 find out why.",
        decimals=4,
        limits=Limits(0.01, 0.1),
    ),
    tile(
        "Effective sample size",
        run_value("effective_sample_size"),
        "Share of the tokens that the importance weights leave.",
        unit=RATIO,
        decimals=0,
        limits=Limits(0.7, 0.4, is_low=True),
    ),
)

_GROUPS = Row(
    title="Scored groups",
    panels=(
        graph(
            "Groups there",
            "In the stream, and held by the trainer for its next steps.",
            Query(stream("stream_backlog", "scored"), "waiting"),
            Query(f"max(rollstream_groups_held{{{TRAINER}}})", "held"),
        ),
        heat(
            "Age of groups when trained",
            "From feeding the prompt to the step.",
            buckets("group_age_seconds", TRAINER),
        ),
        graph(
            "Groups per second",
            "Trained, and dropped by reason.",
            Query(total("groups_out_total", TRAINER), "trained"),
            Query(total("dropped_total", TRAINER, "reason"), "{{reason}}"),
        ),
    ),
)

_STEP = Row(
    title="Step",
    panels=(
        graph(
            "Time of a step",
            "Forward, backward and update.",
            Query(average("step_seconds", TRAINER), "mean"),
            Query(quantile(0.95, "step_seconds", TRAINER), "95 %"),
            unit=SECONDS,
        ),
        graph(
            "Where time goes",
            "Shares; what is missing to 100 % is counting and evaluation.",
            Query(total("busy_seconds_total", TRAINER), "steps"),
            Query(total("idle_seconds_total", TRAINER, "cause"), "{{cause}}"),
            Query(total("weight_publish_seconds_sum", TRAINER), "publishing"),
            Query(total("checkpoint_pause_seconds_sum", TRAINER), "checkpoints"),
            unit=RATIO,
            highest=1,
            is_stacked=True,
        ),
        graph("Tokens per second", "Trained.", Query(total("tokens_out_total", TRAINER), "tokens")),
        graph(
            "Balance of ranks",
            "With several ranks, mean over largest of their tokens: below 1 they wait for each other.",
            Query(run_value("rank_balance"), "balance"),
            unit=RATIO,
        ),
    ),
)

_LEARNING = Row(
    title="Learning",
    panels=(
        graph(
            "Reward",
            "Of sampled completions, and of held-out ones.",
            Query(run_value("reward_mean"), "training"),
            Query(run_value("eval_reward_mean"), "held out"),
            starts_at_zero=False,
        ),
        graph(
            "Loss and gradient",
            "Spikes of the gradient's norm go before collapse; the loss says little.",
            Query(run_value("grad_norm"), "gradient norm"),
            Query(run_value("loss"), "loss"),
            starts_at_zero=False,
        ),
        graph(
            "Entropy and KL",
            "Entropy falls slowly; near 0 nothing is explored. KL is from the initial policy.",
            Query(run_value("entropy"), "entropy"),
            Query(run_value("kl"), "KL"),
            Query(run_value("teacher_kl"), "KL to the teacher"),
            Query(run_value("teacher_jsd"), "JSD to teachers"),
        ),
        graph(
            "Length of completions",
            "No drift that rewards do not explain.",
            Query(run_value("completion_length_mean"), "mean tokens"),
        ),
        graph(
            "Groups that teach nothing",
            "Share of the trained groups whose rewards are all equal.",
            Query(
                f"{total('zero_variance_groups_total', TRAINER)} / ({total('groups_out_total', TRAINER)} > 0)",
                "zero variance",
            ),
            unit=RATIO,
        ),
        graph(
            "Prompts",
            "Rows of the data set by what their last group earned. Only those solved at times teach anything.",
            Query(run_value("prompts_always_solved"), "always solved"),
            Query(run_value("prompts_sometimes_solved"), "sometimes"),
            Query(run_value("prompts_never_solved"), "never"),
            Query(f"{run_value('prompts_in_data')} - {run_value('prompts_seen')}", "not seen"),
            is_stacked=True,
        ),
        graph(
            "Tokens through the model",
            "Per second. Padding is 0 unless the model takes padded rows; shared prompts are what was saved.",
            Query(total("forward_tokens_total", TRAINER), "in forward passes"),
            Query(total("padding_tokens_total", TRAINER), "of them padding"),
            Query(total("shared_prompt_tokens_total", TRAINER), "shared prompts"),
        ),
        graph("Learning rate", "As the schedule says.", Query(run_value("learning_rate"), "rate")),
    ),
)

_OFF_POLICY = Row(
    title="Off-policy",
    panels=(
        graph(
            "Mismatch KL",
            "Divergence of generator and trainer at the same token, in nats; at equal versions only engines differ.",
            Query(run_value("mismatch_kl"), "all tokens"),
            Query(run_value("mismatch_kl_fresh"), "of the trainer's own version"),
            Query(run_value("mismatch_kl_stale"), "of older versions"),
        ),
        graph(
            "Importance weights",
            "Ratio near 1; clipped tokens below a fifth; an effective sample size near 1.",
            Query(run_value("importance_ratio_mean"), "mean ratio"),
            Query(run_value("clip_fraction"), "clipped"),
            Query(run_value("truncated_fraction"), "weight cut"),
            Query(run_value("masked_fraction"), "masked"),
            Query(run_value("effective_sample_size"), "effective sample size"),
        ),
        graph(
            "Importance ratio by age",
            "Quantiles over the tokens of each age: the outer ones spread with age.",
            Query(run_value("importance_ratio_by_age", RUN, "age", "share"), "age {{age}}, {{share}}"),
            starts_at_zero=False,
        ),
        graph(
            "Cut by age",
            "Share of the tokens of each age whose weight was cut, or that were masked: which ages pay.",
            Query(run_value("cut_fraction_by_age", RUN, "age", "cut"), "age {{age}}, {{cut}}"),
            unit=RATIO,
        ),
        graph(
            "Values that are not finite",
            "Masked tokens and skipped steps per second: should stay at 0.",
            Query(total("nonfinite_tokens_total", TRAINER), "tokens"),
            Query(total("skipped_steps_total", TRAINER), "steps"),
        ),
        graph(
            "Tokens without a teacher",
            "Trained per second, with distillation_coef or jsd_coef: 0 unless rows have none on purpose.",
            Query(total("untaught_tokens_total", TRAINER), "tokens"),
        ),
        graph(
            "Teachers' probability on the ids they send",
            "With jsd_coef. Below 0.95 much of a teacher is one bucket: raise its top_k.",
            Query(run_value("teacher_top_mass"), "share"),
            unit=RATIO,
        ),
    ),
)

_KEPT = Row(
    title="Checkpoints",
    panels=(
        graph(
            "Time of a checkpoint",
            "Longer than it should be: the disk. Training stands still only for the pause.",
            Query(average("checkpoint_seconds", TRAINER), "writing"),
            Query(average("checkpoint_pause_seconds", TRAINER), "pause"),
            unit=SECONDS,
        ),
        graph(
            "Kept",
            "What was trained since the newest checkpoint would be done again.",
            Query(run_value("step"), "steps done"),
            Query(run_value("checkpoint_step"), "of the newest checkpoint"),
        ),
        graph(
            "Groups not yet kept",
            "Trained into weights that no checkpoint holds; falls to 0 with each.",
            Query(run_value("ledger", f'{RUN}, state="uncommitted"'), "uncommitted"),
            Query(total("checkpoint_failures_total", TRAINER), "failures per second"),
        ),
    ),
)

TRAINING = Board(
    name="training",
    title="rollstream: training",
    about="The trainer: what it is given, how fast it steps, what it learns, what it keeps.",
    tiles=_TILES,
    rows=(_GROUPS, _STEP, _LEARNING, _OFF_POLICY, _KEPT, processes("trainer")),
)
