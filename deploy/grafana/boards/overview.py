"""The first board: does the run get on, what limits it, what does it lose."""

from __future__ import annotations

from deploy.grafana.board import Board, Row
from deploy.grafana.boards.promql import ANY, RUN, TRAINER, average, mean, quantile, run_value, total
from deploy.grafana.panels import BYTES, RATIO, SECONDS, Limits, Query, graph, listing, tile

_THERE = run_value("workers", f'{RUN}, state!="lost"', "role", "state")
_TILES = (
    tile(
        "Limited by",
        f"{run_value('limiting_stage', RUN, 'stage')} == 1",
        "The stage that sets the pace: workers added there make the run faster.",
        shows_name=True,
        legend="{{stage}}",
    ),
    tile(
        "State",
        f'max(rollstream_blocked{{{RUN}, stage!="control"}}) + 2 * {run_value("paused")}'
        f" or 4 * ({run_value('redis_up')} == bool 0)",
        "Blocked: nothing moves; `rollstream status` says why.",
        words={
            0: ("runs", "green"),
            1: ("blocked", "red"),
            2: ("paused", "yellow"),
            3: ("paused", "yellow"),
            4: ("no Redis", "red"),
        },
    ),
    tile("Step", run_value("step"), "Optimiser steps done.", decimals=0),
    tile("Reward", run_value("reward_mean"), "Mean of the last step's groups: what training is to raise.", decimals=3),
    tile("Trained tokens/s", total("tokens_out_total", TRAINER), "The throughput of the whole run."),
    tile(
        "Age of tokens",
        average("staleness_versions", TRAINER),
        "Versions between drawing a token and training it, on average; staleness.max_staleness is the bound.",
        decimals=2,
    ),
    tile(
        "Workers",
        f"sum({_THERE})",
        "That are there, the exporter included.",
        decimals=0,
    ),
    tile(
        "Dead letters",
        run_value("ledger", f'{RUN}, state="dead"'),
        "Groups that no one can process. `rollstream streams dead-letters` has the reasons.",
        decimals=0,
        limits=Limits(1, 10),
    ),
)

_FLOW = Row(
    title="Flow of groups",
    panels=(
        graph(
            "Groups per second",
            "All stages agree in the long run, but for held-out groups, which are not trained.",
            Query(total("groups_out_total", ANY, "role"), "{{role}}"),
        ),
        graph(
            "Waiting in streams",
            "Lag: groups that nobody has claimed. They pile up in front of the slowest stage.",
            Query(run_value("stream_backlog", RUN, "stream"), "{{stream}}"),
            is_stacked=True,
        ),
        graph(
            "In work",
            "Pending: groups that a worker holds.",
            Query(run_value("stream_pending", RUN, "stream"), "{{stream}}"),
            is_stacked=True,
        ),
        graph(
            "Tokens per second",
            "Generated and trained; what lies between is lost or still on its way.",
            Query(total("tokens_out_total", ANY, "role"), "{{role}}"),
        ),
        graph(
            "Age of a group when trained",
            "From feeding the prompt to the step: the latency of the loop.",
            Query(quantile(0.5, "group_age_seconds", TRAINER), "median"),
            Query(quantile(0.95, "group_age_seconds", TRAINER), "95 %"),
            unit=SECONDS,
        ),
        graph(
            "Longest pending and waiting",
            "Pending much longer than the others take: its worker is stuck or gone.",
            Query(run_value("oldest_pending_seconds", RUN, "stream"), "{{stream}} in work"),
            Query(run_value("oldest_waiting_seconds", RUN, "stream"), "{{stream}} waits"),
            unit=SECONDS,
        ),
    ),
)

_TIME = Row(
    title="Where time goes",
    panels=(
        graph(
            "Busy",
            "Share of the time in which a worker has work.",
            Query(mean("busy_seconds_total", ANY, "role"), "{{role}}"),
            unit=RATIO,
            highest=1,
        ),
        graph(
            "Idle, by cause",
            "no_input: the stage before is slower. stale_weights: the weight channel. output_full: the stage after.",
            Query(mean("idle_seconds_total", ANY, "role", "cause"), "{{role}} {{cause}}"),
            unit=RATIO,
            highest=1,
        ),
        graph(
            "What limits the rate",
            "The stage that sets the pace, as the trainer concludes from the last minute.",
            Query(run_value("limiting_stage", RUN, "stage"), "{{stage}}"),
            is_stacked=True,
            highest=1,
        ),
    ),
)

_LEARNING = Row(
    title="Learning",
    panels=(
        graph(
            "Reward",
            "Of sampled completions, and of held-out ones: trust the second.",
            Query(run_value("reward_mean"), "training"),
            Query(run_value("eval_reward_mean"), "held out"),
            starts_at_zero=False,
        ),
        graph(
            "Age of trained tokens",
            "Versions; above the bound they are corrected, masked or dropped.",
            Query(average("staleness_versions", TRAINER), "mean"),
            Query(quantile(0.99, "staleness_versions", TRAINER), "99 %"),
            Query(run_value("max_staleness_versions"), "bound"),
        ),
        graph(
            "Ledger",
            "fed = trained + dropped + dead + live, at every instant.",
            Query(run_value("ledger", f'{RUN}, state=~"trained|dropped|dead|live"', "state"), "{{state}}"),
            is_stacked=True,
        ),
    ),
)

_LOSSES = Row(
    title="Losses",
    panels=(
        graph(
            "Dropped groups per second",
            "stale: generators are too far behind. zero_variance, out_of_range: prompts are too easy or too hard.",
            Query(total("dropped_total", ANY, "reason"), "{{reason}}"),
        ),
        graph(
            "Dead letters and late results per second",
            "Both should stay at 0.",
            Query(total("dead_letters_total", ANY, "stage"), "dead in {{stage}}"),
            Query(total("refused_total", ANY, "role"), "refused of {{role}}"),
        ),
        graph(
            "Wasted tokens per second",
            "Generated and never trained.",
            Query(total("tokens_wasted_total", ANY, "role", "reason"), "{{role}} {{reason}}"),
            Query(total("masked_tokens_total", TRAINER), "masked for their age"),
        ),
    ),
)

_FLEET = Row(
    title="Fleet and server",
    panels=(
        graph(
            "Workers",
            "lost: gone without a word.",
            Query(run_value("workers", RUN, "role", "state"), "{{role}} {{state}}"),
        ),
        graph(
            "Longest silence",
            "Since the last sign of life, of the most silent worker of each role.",
            Query(run_value("heartbeat_age_seconds", RUN, "role"), "{{role}}"),
            unit=SECONDS,
        ),
        graph(
            "Memory of Redis",
            "Bounded by admission; growth is someone else's.",
            Query(run_value("redis_memory_bytes"), "used"),
            Query(f"{run_value('redis_memory_max_bytes')} > 0", "may be used"),
            unit=BYTES,
        ),
        listing(
            "Workers",
            "Where each of them runs.",
            f"max by (role, worker, host, version) (rollstream_worker_info{{{RUN}}})",
            hidden=(),
            width=8,
        ),
        graph(
            "Workers there and wanted",
            "Wanted: what `up` keeps, as `rollstream scale` or the autoscaler asked.",
            Query(f"sum by (role) ({_THERE})", "{{role}}"),
            Query(run_value("workers_wanted", RUN, "role"), "{{role}} wanted"),
        ),
        graph(
            "Time to read the run",
            "How long Redis takes to answer the exporter; outages are counted by the workers.",
            Query(run_value("run_read_seconds"), "read"),
            Query(total("redis_outages_total", ANY), "outages per second"),
            unit=SECONDS,
        ),
    ),
)

OVERVIEW = Board(
    name="overview",
    title="rollstream: overview",
    about="Does the run get on, what limits it, what does it lose.",
    tiles=_TILES,
    rows=(_FLOW, _TIME, _LEARNING, _LOSSES, _FLEET),
)
