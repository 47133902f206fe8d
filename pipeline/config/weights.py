"""Settings of the way back: new weights from the trainer to the generators."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.base import Count, Port, Seconds, Section

# Hosts that no other machine reaches.
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class WeightSettings(Section):
    """The way back: new weights from the trainer to the generators."""

    store: str = Field(
        "",
        description="Through files instead: a shared directory, or s3://bucket/folder (gs://, az://); empty: ZeroMQ.",
    )
    store_grace_s: Seconds = Field(
        600.0, description="In a store, a slow reader has this long to finish a version that was overtaken."
    )
    host: str = Field(
        "127.0.0.1", description="Address the trainer binds; anything but loopback needs CURVE or insecure."
    )
    advertise: str = Field("", description="Address that generators connect to, when it differs from host.")
    port: Port = Field(0, description="Tiles; 0 takes a free port.")
    announce_port: Port = Field(0, description="Announcements; 0 takes a free port.")
    tile_bytes: Annotated[int, Field(ge=4096, le=64 * 1024 * 1024)] = Field(
        4 * 1024 * 1024, description="Unit of transfer and verification."
    )
    encoding: Literal["auto", "delta", "snapshot"] = Field(
        "auto", description="Only what changed, all of it, or what is faster on this line and these cores."
    )
    credits: Annotated[int, Field(ge=1, le=256)] = Field(8, description="Tiles a subscriber has on order at once.")
    poll_s: Seconds = Field(2.0, description="A lost announcement delays new weights by at most this.")
    own_process: Literal["auto", "always", "never"] = Field(
        "auto", description="Encodes and serves in a process beside the trainer's; auto: versions of 16 MiB and more."
    )
    max_mbit_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="A receiver takes weights no faster than this, in Mbit/s; 0 for as fast as they come."
    )
    share_on_host: bool = Field(
        True, description="Generators of a run on one machine: one receives, into memory that the others map."
    )
    relay: bool = Field(False, description="This generator passes weights on, so that the trainer sends them once.")
    relay_host: str = Field(
        "127.0.0.1", description="Address a relay binds; anything but loopback needs CURVE or insecure."
    )
    relay_advertise: str = Field("", description="Address that others connect to, when it differs from relay_host.")
    relay_fanout: Count = Field(2, description="Relays that fetch from one relay; the first fetches from the trainer.")
    publish_every: Count = Field(1, description="Optimiser steps between published versions.")
    insecure: bool = Field(False, description="Allows binding other than loopback without encryption.")
    server_secret_key_file: str = Field("", description="CURVE secret key of the trainer.")
    server_public_key: str = Field("", description="CURVE public key of the trainer, for generators.")
    allowed_keys: list[str] = Field(
        [], description="CURVE public keys of those who may receive; empty: whoever knows the trainer's."
    )
    client_secret_key_file: str = Field(
        "", description="CURVE secret key of a generator, where the trainer has allowed_keys."
    )
    shared_key_file: str = Field(
        "", description="Signs every message on both sides, where CURVE is off; what is sent can still be read by all."
    )
    max_model_bytes: Count = Field(1 << 42, description="A manifest that claims more is refused.")
