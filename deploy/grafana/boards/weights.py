"""The way back of the weights, and how old tokens are because of it."""

from __future__ import annotations

from deploy.grafana.board import Board, Row
from deploy.grafana.boards.promql import (
    ANY,
    GENERATORS,
    RUN,
    TRAINER,
    average,
    buckets,
    mean,
    quantile,
    run_value,
    total,
)
from deploy.grafana.panels import BYTES_PER_S, PLAIN, RATIO, SECONDS, Limits, Query, graph, heat, tile

_BEHIND = f"scalar({run_value('run_weight_version')}) - rollstream_weight_version{{{GENERATORS}}}"
_STALE = f'{TRAINER}, reason="stale"'
_STALE_SHARE = (
    f"{total('dropped_total', _STALE)} / ({total('dropped_total', _STALE)} + {total('groups_out_total', TRAINER)} > 0)"
)

_TILES = (
    tile("Version", run_value("run_weight_version"), "Newest of the run.", decimals=0),
    tile(
        "Furthest behind",
        f"max({_BEHIND})",
        "Versions between the newest and the oldest that a generator serves, as of moments some seconds apart.",
        decimals=0,
    ),
    tile("Mean age", average("staleness_versions", TRAINER), "Of trained tokens, in versions.", decimals=2),
    tile(
        "Oldest tokens",
        quantile(0.99, "staleness_versions", TRAINER),
        "99 % of the trained tokens are younger, in versions.",
        decimals=1,
    ),
    tile(
        "Waiting for weights",
        mean("idle_seconds_total", f'{GENERATORS}, cause="stale_weights"'),
        "Share of the time of generators.",
        unit=RATIO,
        decimals=1,
        limits=Limits(0.1, 0.3),
    ),
    tile(
        "Paused",
        mean("weight_pause_seconds_sum", GENERATORS),
        "Share of the time in which generation stands still for an update.",
        unit=RATIO,
        decimals=2,
        limits=Limits(0.05, 0.2),
    ),
    tile("Received", total("weight_bytes_total", GENERATORS), "By all generators.", unit=BYTES_PER_S),
    tile(
        "Stale drops",
        _STALE_SHARE,
        "Share of the groups that are too old to be trained.",
        unit=RATIO,
        decimals=1,
        limits=Limits(0.01, 0.05),
    ),
)

_TRAINER_END = Row(
    title="The trainer's end",
    panels=(
        graph(
            "Publish and encode",
            "Publishing delays the next step; encoding only where no other process does it.",
            Query(average("weight_publish_seconds", TRAINER), "publish"),
            Query(average("weight_encode_seconds", TRAINER), "encode"),
            unit=SECONDS,
        ),
        graph(
            "Send",
            "From a receiver's first request for a version to its last.",
            Query(quantile(0.5, "weight_send_seconds", TRAINER), "median"),
            Query(quantile(0.95, "weight_send_seconds", TRAINER), "95 %"),
            unit=SECONDS,
        ),
        graph(
            "Transfers under way",
            "All generators all the time: the channel is slow.",
            Query(run_value("weight_receivers"), "receivers"),
        ),
    ),
)

_WAY = Row(
    title="On the way",
    panels=(
        graph(
            "Bytes per second",
            "Sent by the trainer, received by generators, and the size of what these then have.",
            Query(total("weight_bytes_total", ANY, "role"), "{{role}}"),
            Query(total("weight_content_bytes_total", GENERATORS), "content"),
            unit=BYTES_PER_S,
        ),
        graph(
            "Receive and verify",
            "While serving goes on.",
            Query(quantile(0.95, "weight_receive_seconds", GENERATORS), "receive, 95 %"),
            Query(quantile(0.95, "weight_verify_seconds", GENERATORS), "verify, 95 %"),
            unit=SECONDS,
        ),
        graph(
            "Versions per second",
            "Received, of these sent as changes only, and overtaken by newer ones.",
            Query(total("weight_receive_seconds_count", GENERATORS), "received"),
            Query(total("weight_patched_total", GENERATORS), "only changes"),
            Query(total("weight_skipped_total", GENERATORS), "overtaken"),
        ),
    ),
)

_APPLY = Row(
    title="Taking over",
    panels=(
        graph(
            "Apply and pause",
            "From verified weights to the new version serving; the pause is a part of it.",
            Query(quantile(0.95, "weight_apply_seconds", GENERATORS), "apply, 95 %"),
            Query(quantile(0.95, "weight_pause_seconds", GENERATORS), "pause, 95 %"),
            unit=SECONDS,
        ),
        graph(
            "Share of the time paused",
            "Lost generation time, by generator.",
            Query(mean("weight_pause_seconds_sum", GENERATORS, "worker"), "{{worker}}"),
            unit=RATIO,
        ),
        graph(
            "Versions behind",
            "Of each generator; more than staleness.max_staleness for long: it may generate nothing.",
            Query(f"max by (worker) ({_BEHIND})", "{{worker}}"),
            Query(run_value("max_staleness_versions"), "bound"),
        ),
    ),
)

_FRESHNESS = Row(
    title="Freshness",
    panels=(
        heat(
            "Distribution of ages",
            "Versions between drawing a token and training it, token by token.",
            buckets("staleness_versions", TRAINER),
            unit=PLAIN,
        ),
        graph(
            "Age of trained tokens",
            "Above the bound they are corrected, masked or dropped.",
            Query(average("staleness_versions", TRAINER), "mean"),
            Query(quantile(0.99, "staleness_versions", TRAINER), "99 %"),
            Query(run_value("max_staleness_versions"), "bound"),
        ),
        graph(
            "Too old",
            "Groups dropped and tokens masked per second.",
            Query(total("dropped_total", _STALE), "groups dropped"),
            Query(total("masked_tokens_total", TRAINER), "tokens masked"),
            Query(total("tokens_wasted_total", f'{RUN}, reason="stale"'), "tokens wasted"),
        ),
    ),
)

_TROUBLE = Row(
    title="Trouble",
    panels=(
        graph(
            "Refused weights per second",
            "They failed verification or did not fit: the old version goes on.",
            Query(total("weight_failures_total", GENERATORS, "worker"), "{{worker}}"),
        ),
        graph(
            "Turned away per second",
            "A wrong key, another program, or someone who tries; they got nothing.",
            Query(total("weight_unwelcome_total", TRAINER, "reason"), "{{reason}}"),
        ),
        graph(
            "Not written per second",
            "Versions that weights.store did not take: it is full or out of reach.",
            Query(total("weight_store_failures_total", TRAINER), "versions"),
        ),
        graph(
            "Wrong pieces per second",
            "Not what their hash says, or not there: nothing of it is served, and it is fetched again.",
            Query(total("weight_pieces_wrong_total", GENERATORS, "reason"), "{{reason}}"),
            Query(total("weight_put_back_total", TRAINER), "files put back"),
        ),
    ),
)

WEIGHTS = Board(
    name="weights",
    title="rollstream: weights and freshness",
    about="The way back of the weights, and how old tokens are because of it.",
    tiles=_TILES,
    rows=(_TRAINER_END, _WAY, _APPLY, _FRESHNESS, _TROUBLE),
)
