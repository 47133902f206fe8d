"""What became of the weights that a trainer published, for its metrics, and who got none.

In: a publisher's figures, now and then. Out: metrics, and a warning that names settings when somebody is
turned away, at the first one and whenever there are twice as many as at the last warning.
"""

from __future__ import annotations

from pipeline.instruments import observe_each
from pipeline.logs import get_logger
from pipeline.weight_metrics import WeightMetrics
from pipeline.weights.channel import Publisher

_SUSPECTS = {
    "handshake": "CURVE keys that do not fit: weights.server_public_key of a generator is to be the public key of this "
    "trainer's weights.server_secret_key_file, and that of its weights.client_secret_key_file in weights.allowed_keys "
    "here, where that is not empty; else a program that is no generator",
    "unsigned": "a generator without weights.shared_key_file, or with another key in it than here",
    "malformed": "a generator with weights.shared_key_file where this trainer has none; else a program that is none",
}

log = get_logger()


class Account:
    """Of one publisher."""

    def __init__(self, publisher: Publisher, metrics: WeightMetrics) -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._counted = publisher.stats
        self._told: dict[str, int] = {}  # reason -> how many had been turned away at the last warning

    def update(self) -> None:
        """Count what was done since it was last asked; a version that was just published is sent later."""
        stats, before, metrics = self._publisher.stats, self._counted, self._metrics
        observe_each(
            metrics.weight_encode_seconds, stats.num_versions - before.num_versions, stats.encode_s - before.encode_s
        )
        observe_each(
            metrics.weight_send_seconds,
            stats.server.num_transfers - before.server.num_transfers,
            stats.server.transfer_s - before.server.transfer_s,
        )
        metrics.weight_bytes_total.inc(stats.server.num_bytes - before.server.num_bytes)
        metrics.weight_store_failures_total.inc(stats.num_failures - before.num_failures)
        metrics.weight_put_back_total.inc(stats.num_put_back - before.num_put_back)
        for reason, count in stats.server.unwelcome.items():
            metrics.weight_unwelcome_total.labels(reason=reason).inc(count - before.server.unwelcome[reason])
            self._tell(reason, count)
        metrics.weight_receivers.set(stats.num_receivers)
        self._counted = stats

    def _tell(self, reason: str, count: int) -> None:
        told = self._told.get(reason, 0)
        if count > 0 and count >= 2 * told:
            self._told[reason] = count
            log.warning("weights_not_given", reason=reason, num=count, may_be=_SUSPECTS[reason])
