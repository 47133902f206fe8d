"""Scorers: what they are given, what rewards say and how long they take."""

from __future__ import annotations

from deploy.grafana.board import Board, Row
from deploy.grafana.boards.process import processes
from deploy.grafana.boards.promql import (
    MODELS,
    RUN,
    SCORERS,
    alive,
    buckets,
    mean,
    mean_reward,
    of_role,
    quantile,
    run_value,
    stream,
    total,
)
from deploy.grafana.panels import PLAIN, RATIO, SECONDS, Limits, Query, graph, heat, tile

_FAILED = f'{SCORERS}, outcome=~"error|timeout"'
_FAILURES = f"{total('reward_calls_total', _FAILED)} / ({total('reward_calls_total', SCORERS)} > 0)"

_TILES = (
    tile("Scorers", alive("scorer"), "That are there now.", decimals=0),
    tile("Groups/s", total("groups_out_total", SCORERS), "Handed over to the trainer.", decimals=2),
    tile("Rollouts waiting", stream("stream_backlog", "rollouts"), "The lag of scoring: scale by it.", decimals=0),
    tile(
        "Wait of a rollout",
        quantile(0.95, "queue_wait_seconds", SCORERS),
        "95 % are claimed within this time.",
        unit=SECONDS,
        decimals=2,
    ),
    tile("Busy", mean("busy_seconds_total", SCORERS), "Share of the time with work.", unit=RATIO, decimals=0),
    tile("Mean reward", mean_reward(SCORERS), "Over all functions and completions.", decimals=3),
    tile(
        "Longest calls",
        quantile(0.95, "reward_seconds", SCORERS),
        "95 % of the calls take less; compare with scoring.timeout_s.",
        unit=SECONDS,
        decimals=2,
    ),
    tile(
        "Failed calls",
        _FAILURES,
        "Completions whose reward raised or took too long: they stay unscored.",
        unit=RATIO,
        decimals=1,
        limits=Limits(0.01, 0.05),
    ),
)

_ROLLOUTS = Row(
    title="Rollouts",
    panels=(
        graph(
            "Rollouts in the stream",
            "Waiting ones are the lag of scoring.",
            Query(stream("stream_backlog", "rollouts"), "waiting"),
            Query(stream("stream_pending", "rollouts"), "in work"),
            is_stacked=True,
        ),
        graph(
            "Wait of a rollout",
            "Between generation and scoring.",
            Query(quantile(0.5, "queue_wait_seconds", SCORERS), "median"),
            Query(quantile(0.95, "queue_wait_seconds", SCORERS), "95 %"),
            unit=SECONDS,
        ),
        graph(
            "Tokens per second",
            "Of the completions that were scored.",
            Query(total("tokens_in_total", SCORERS, "worker"), "{{worker}}"),
            is_stacked=True,
        ),
    ),
)

_REWARDS = Row(
    title="Rewards",
    panels=(
        graph(
            "Mean, by function",
            "What each function gives, before weights.",
            Query(mean_reward(SCORERS, "function"), "{{function}}"),
            starts_at_zero=False,
        ),
        heat(
            "Values",
            "All in one bucket: the functions tell nothing apart.",
            buckets("reward_value", SCORERS),
            unit=PLAIN,
        ),
        graph(
            "Outcomes per second",
            "none: does not apply. error and timeout are no zeros.",
            Query(total("reward_calls_total", SCORERS, "function", "outcome"), "{{function}} {{outcome}}"),
            is_stacked=True,
        ),
    ),
)

_TIME = Row(
    title="Where time goes",
    panels=(
        graph(
            "Time of a call",
            "Of one function on one group.",
            Query(quantile(0.5, "reward_seconds", SCORERS, "function"), "{{function}} median"),
            Query(quantile(0.95, "reward_seconds", SCORERS, "function"), "{{function}} 95 %"),
            unit=SECONDS,
        ),
        graph(
            "Busy",
            "Share of the time with work, by scorer.",
            Query(mean("busy_seconds_total", SCORERS, "worker"), "{{worker}}"),
            unit=RATIO,
            highest=1,
        ),
        graph(
            "Idle, by cause",
            "no_input: generation is slower. output_full: the trainer is.",
            Query(mean("idle_seconds_total", SCORERS, "cause"), "{{cause}}"),
            unit=RATIO,
            highest=1,
            is_stacked=True,
        ),
    ),
)

_LOSSES = Row(
    title="Losses",
    panels=(
        graph(
            "Groups per second",
            "Scored, by scorer.",
            Query(total("groups_out_total", SCORERS, "worker"), "{{worker}}"),
            is_stacked=True,
        ),
        graph(
            "Late results per second",
            "The lease was lost before the score came.",
            Query(total("refused_total", SCORERS, "worker"), "{{worker}}"),
        ),
        graph(
            "Dead rollouts per second",
            "That no scorer can read or score.",
            Query(total("dead_letters_total", f'{RUN}, stage="rollouts"'), "rollouts"),
        ),
    ),
)

_MODELS = Row(
    title="Teachers and judges",
    panels=(
        graph(
            "Groups in front of them",
            "Their lag, where the run has them: scale by it.",
            Query(run_value("stream_backlog", f'{RUN}, stream=~"to_teach|to_judge"', "stream"), "{{stream}}"),
        ),
        graph(
            "Groups per second of models",
            "Handed on, by worker.",
            Query(total("groups_out_total", MODELS, "worker"), "{{worker}}"),
            is_stacked=True,
        ),
        graph(
            "Busy models",
            "Share of the time with work, by worker.",
            Query(mean("busy_seconds_total", MODELS, "worker"), "{{worker}}"),
            unit=RATIO,
            highest=1,
        ),
        graph(
            "Judgements per second",
            "Completions judged by models, by outcome.",
            Query(total("reward_calls_total", of_role("judge"), "function", "outcome"), "{{function}} {{outcome}}"),
        ),
    ),
)

SCORING = Board(
    name="scoring",
    title="rollstream: scoring",
    about="Scorers: what they are given, what rewards say and how long they take.",
    tiles=_TILES,
    rows=(_ROLLOUTS, _REWARDS, _TIME, _MODELS, _LOSSES, processes("scorer")),
)
