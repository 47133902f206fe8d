"""Generators: what they are given, how fast they are, what holds them up."""

from __future__ import annotations

from deploy.grafana.board import Board, Row
from deploy.grafana.boards.process import processes
from deploy.grafana.boards.promql import GENERATORS, RUN, alive, mean, quantile, run_value, stream, total
from deploy.grafana.panels import RATIO, SECONDS, Limits, Query, graph, tile

_SLOTS = f"sum(rollstream_sequences_running{{{GENERATORS}}}) / sum(rollstream_sequence_slots{{{GENERATORS}}})"
_WASTED = f"{total('tokens_wasted_total', GENERATORS)} / ({total('tokens_out_total', GENERATORS)} > 0)"

_TILES = (
    tile("Generators", alive("generator"), "That are there now.", decimals=0),
    tile("Tokens/s", total("tokens_sampled_total", GENERATORS), "Drawn by all engines."),
    tile("Groups/s", total("groups_out_total", GENERATORS), "Handed over to scorers.", decimals=2),
    tile("Slots in use", _SLOTS, "Free slots are unused speed.", unit=RATIO, decimals=0),
    tile("Prompts waiting", stream("stream_backlog", "prompts"), "0 for long: the feeder or admission.", decimals=0),
    tile(
        "Busy",
        mean("busy_seconds_total", GENERATORS),
        "Share of the time with at least one group in work.",
        unit=RATIO,
        decimals=0,
    ),
    tile(
        "Waiting for weights",
        mean("idle_seconds_total", f'{GENERATORS}, cause="stale_weights"'),
        "Share of the time in which weights are too old to go on.",
        unit=RATIO,
        decimals=1,
        limits=Limits(0.1, 0.3),
    ),
    tile(
        "Wasted tokens",
        _WASTED,
        "Of those generated, what a generator itself throws away.",
        unit=RATIO,
        decimals=1,
        limits=Limits(0.02, 0.1),
    ),
)

_PROMPTS = Row(
    title="Prompts",
    panels=(
        graph(
            "Prompts in the stream",
            "Waiting ones are the lag of generation: scale by them.",
            Query(stream("stream_backlog", "prompts"), "waiting"),
            Query(stream("stream_pending", "prompts"), "in work"),
            is_stacked=True,
        ),
        graph(
            "Wait of a prompt",
            "Between feeding and claiming. None: generators are starved.",
            Query(quantile(0.5, "queue_wait_seconds", GENERATORS), "median"),
            Query(quantile(0.95, "queue_wait_seconds", GENERATORS), "95 %"),
            unit=SECONDS,
        ),
        graph(
            "Prompts per second",
            "Claimed, by generator.",
            Query(total("groups_in_total", GENERATORS, "worker"), "{{worker}}"),
        ),
    ),
)

_ENGINE = Row(
    title="Engine",
    panels=(
        graph(
            "Tokens per second",
            "Drawn by each engine, also of groups that are not done.",
            Query(total("tokens_sampled_total", GENERATORS, "worker"), "{{worker}}"),
            is_stacked=True,
        ),
        graph(
            "Completions in work",
            "Of each engine, below the slots of one.",
            Query(f"max by (worker) (rollstream_sequences_running{{{GENERATORS}}})", "{{worker}}"),
            Query(f"max(rollstream_sequence_slots{{{GENERATORS}}})", "slots of one engine"),
        ),
        graph(
            "Groups per second",
            "Finished and handed over, by generator.",
            Query(total("groups_out_total", GENERATORS, "worker"), "{{worker}}"),
            is_stacked=True,
        ),
    ),
)

_TIME = Row(
    title="Where time goes",
    panels=(
        graph(
            "Busy",
            "Share of the time with work, by generator.",
            Query(mean("busy_seconds_total", GENERATORS, "worker"), "{{worker}}"),
            unit=RATIO,
            highest=1,
        ),
        graph(
            "Idle, by cause",
            "no_input: no prompts. stale_weights: the weight channel. output_full: scorers are slower.",
            Query(mean("idle_seconds_total", GENERATORS, "cause"), "{{cause}}"),
            Query(mean("device_wait_seconds_total", GENERATORS), "waits for the device"),
            unit=RATIO,
            highest=1,
            is_stacked=True,
        ),
        graph(
            "Groups held",
            "In work, by generator.",
            Query(f"max by (worker) (rollstream_groups_held{{{GENERATORS}}})", "{{worker}}"),
        ),
    ),
)

_WEIGHTS = Row(
    title="Weights",
    panels=(
        graph(
            "Version",
            "That each generator serves, and the newest of the run.",
            Query(f"max by (worker) (rollstream_weight_version{{{GENERATORS}}})", "{{worker}}"),
            Query(run_value("run_weight_version"), "newest"),
            starts_at_zero=False,
        ),
        graph(
            "Pause of an update",
            "Generation stands still meanwhile.",
            Query(quantile(0.5, "weight_pause_seconds", GENERATORS), "median"),
            Query(quantile(0.95, "weight_pause_seconds", GENERATORS), "95 %"),
            unit=SECONDS,
        ),
        graph(
            "Share of the time paused",
            "For updates of the weights.",
            Query(mean("weight_pause_seconds_sum", GENERATORS), "paused"),
            unit=RATIO,
        ),
    ),
)

_LOSSES = Row(
    title="Losses",
    panels=(
        graph(
            "Wasted and rescued tokens per second",
            "Rescued: taken over from generators that left.",
            Query(total("tokens_wasted_total", GENERATORS, "reason"), "{{reason}}"),
            Query(total("tokens_carried_total", GENERATORS), "rescued"),
        ),
        graph(
            "Late results per second",
            "The lease was lost: raise queues.lease_s, or find out what stalls the worker.",
            Query(total("refused_total", GENERATORS, "worker"), "{{worker}}"),
        ),
        graph(
            "Dead prompts per second",
            "That no generator can complete.",
            Query(total("dead_letters_total", f'{RUN}, stage="prompts"'), "prompts"),
        ),
    ),
)

GENERATION = Board(
    name="generation",
    title="rollstream: generation",
    about="Generators: what they are given, how fast they are, what holds them up.",
    tiles=_TILES,
    rows=(_PROMPTS, _ENGINE, _TIME, _WEIGHTS, _LOSSES, processes("generator")),
)
