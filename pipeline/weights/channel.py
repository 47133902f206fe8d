"""Which weight channel the settings name: what its two ends can do, and where they come from."""

from __future__ import annotations

from typing import Protocol

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError
from pipeline.logs import get_logger
from pipeline.places import own_folder
from pipeline.weights.address_watch import Resolve
from pipeline.weights.meeting import remove_abandoned
from pipeline.weights.process import PublisherProcess, has_shared_memory
from pipeline.weights.publisher import PublisherStats, WeightPublisher
from pipeline.weights.receiver import Subscriber, create_receiver
from pipeline.weights.relay import Relay
from pipeline.weights.sharing import SharedSubscriber
from pipeline.weights.state import Endpoints, WeightState
from pipeline.weights.store.publisher import StorePublisher

_WORTH_A_PROCESS = 16 * 1024 * 1024  # bytes of a version: less is hashed before another process has woken up

log = get_logger()


class Publisher(Protocol):
    """The trainer's end."""

    def start(self) -> Endpoints:
        """Be there for subscribers, who find it by what is returned. Raises ConfigError."""

    def publish(self, state: WeightState) -> object:
        """Offer a version, and return as soon as the caller may change its tensors. Raises WeightError."""

    @property
    def is_serving(self) -> bool:
        """Whether subscribers are served; not before `start`."""

    @property
    def stats(self) -> PublisherStats:
        """Figures since the start."""

    def close(self) -> None:
        """End. Safe to call twice."""


def create_publisher(settings: WeightSettings, *, num_bytes: int, run: str) -> Publisher:
    """The trainer's end of the channel. num_bytes: size of a version. run: tells it from all others in a store.

    Raises ConfigError, also for a version that every subscriber with these settings would refuse.
    """
    if num_bytes > settings.max_model_bytes:
        raise ConfigError(
            f"weights.max_model_bytes = {settings.max_model_bytes}: a version of this model has {num_bytes} bytes, and "
            "nobody would take it; set it to at least that, here and for generators"
        )
    if settings.store:
        return StorePublisher(settings, run=run)
    if settings.server_public_key and not settings.server_secret_key_file:
        raise ConfigError(
            f"weights.server_public_key = {settings.server_public_key!r} without weights.server_secret_key_file: "
            "generators with it would take nothing from this trainer; name the file of the secret, or leave it out"
        )
    is_worthwhile = settings.own_process == "always" or num_bytes >= _WORTH_A_PROCESS
    if is_worthwhile and settings.own_process != "never" and has_shared_memory():
        return PublisherProcess(settings)
    return WeightPublisher(settings)


def create_subscriber(
    settings: WeightSettings, resolve: Resolve, *, run_id: str, relay: Relay | None = None
) -> Subscriber:
    """A generator's end of the channel. Raises ConfigError.

    run_id: those with the same one share a receiver. relay: passes weights on, where this one receives.
    """
    if settings.share_on_host and has_shared_memory():
        try:
            folder = own_folder(f"weights of run {run_id}")
            remove_abandoned(folder)
            return SharedSubscriber(settings, resolve=resolve, folder=folder, relay=relay)
        except OSError as error:
            log.warning(
                "weights_not_shared",
                reason=f"{type(error).__name__}: {error}",
                effect="this generator receives for itself",
                way_out="let TMPDIR name a folder that can be written, or set weights.share_on_host = false",
            )
    return create_receiver(settings, resolve, relay=relay)
