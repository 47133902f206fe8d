"""Metrics of the weight channel: what the trainer sends, what generators receive and apply.

In: nothing. Out: declarations that `pipeline.metrics` continues. They say how long each part of a
version's way takes, and what of it holds generation up.
"""

from __future__ import annotations

from pipeline.instruments import MetricTable, counter, counters, gauge, histogram, late_gauge

_GENERATOR = ("generator",)
_TRAINER = ("trainer",)
_BOTH = ("generator", "trainer")

WAY_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class WeightMetrics(MetricTable):
    """Instruments of the weight channel, in the order of a version's way."""

    weight_version = late_gauge(
        "version", "Weights that this worker serves or has made.", "Generators trail the trainer.", roles=_BOTH
    )
    weight_publish_seconds = histogram(
        "seconds",
        "Time that the trainer spends on a version: copy, and encoding where no other process does it.",
        "Delays the next step.",
        buckets=WAY_SECONDS,
        roles=_TRAINER,
    )
    weight_encode_seconds = histogram(
        "seconds",
        "Hashing of a version and comparison with the one before.",
        "Delays its arrival; the next step only without a process of its own.",
        buckets=WAY_SECONDS,
        roles=_TRAINER,
    )
    weight_send_seconds = histogram(
        "seconds",
        "From a receiver's first request for a version to its last, or one write into the store.",
        "Long: the line, or too many receivers at once; see weights.relay.",
        buckets=WAY_SECONDS,
        roles=_TRAINER,
    )
    weight_receivers = gauge(
        "receivers",
        "Transfers that are under way.",
        "All generators all the time: the channel is slow.",
        roles=_TRAINER,
    )
    weight_unwelcome_total = counters(
        "reason",
        unit="messages",
        help="Connections that ended in the handshake, messages without the shared key's signature, and others "
        "that are none.",
        reading="Above 0: a wrong key, another program, or someone who tries; they got nothing.",
        roles=_TRAINER,
        starts={"trainer": ("handshake", "unsigned", "malformed")},
    )
    weight_store_failures_total = counter(
        "attempts",
        "Versions that could not be written into weights.store, and are tried again.",
        "Rising: the store is full or out of reach; generators stay at the version that is there.",
        roles=_TRAINER,
    )
    weight_put_back_total = counter(
        "files",
        "Files of the newest version in weights.store that were gone or not what was written, and were put back.",
        "Should stay at 0: somebody cleans up there, or its disk cannot be trusted.",
        roles=_TRAINER,
    )
    weight_bytes_total = counter(
        "bytes", "Sent over the weight channel, or received.", "Its rate is the load of the line.", roles=_BOTH
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
    weight_pieces_wrong_total = counters(
        "reason",
        unit="pieces",
        help="Tiles and other parts of weights that were not what their hash says, or did not come.",
        reading="Rising: the line, weights.store or its disk; nothing of it is served, and it is fetched again.",
        roles=_GENERATOR,
        starts={"generator": ("corrupt", "lost", "refused")},
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
        "seconds",
        "From the manifest to the last piece.",
        "While serving goes on.",
        buckets=WAY_SECONDS,
        roles=_GENERATOR,
    )
    weight_verify_seconds = histogram(
        "seconds",
        "Hashing, copying and patching of one version.",
        "While serving goes on.",
        buckets=WAY_SECONDS,
        roles=_GENERATOR,
    )
    weight_apply_seconds = histogram(
        "seconds",
        "From verified weights to the new version serving.",
        "Part of it is the pause.",
        buckets=WAY_SECONDS,
        roles=_GENERATOR,
    )
    weight_pause_seconds = histogram(
        "seconds",
        "Generation stood still for an update.",
        "Lost generation time.",
        buckets=WAY_SECONDS,
        roles=_GENERATOR,
    )
