"""Settings of the run itself: its name, its server and queues, its processes, records and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from pipeline.config.base import Count, Fraction, Natural, Port, Seconds, Section

EMBEDDED = "embedded"


class RunSettings(Section):
    """Identity of the run. All its workers use the same name."""

    name: str = Field("default", description="All workers of a run share it; it prefixes every key in Redis.")
    dir: Path = Field(Path("runs"), description="Run directories are made below this folder.")
    topology: Literal["disaggregated", "colocated"] = Field(
        "disaggregated",
        description="disaggregated: generators and trainer have devices of their own and work at once; colocated: "
        "they take turns on one.",
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(
        0, description="Order of prompts, sampling and initial adapters derive from it."
    )


class RedisSettings(Section):
    """Where the queues live."""

    url: SecretStr = Field(
        SecretStr(EMBEDDED),
        description='"embedded": a private Valkey, for `demo` and `up`; else a redis://, rediss:// or unix:// URL, or '
        "redis+sentinel://host:port,host:port/service/0.",
    )
    must_persist: bool = Field(
        False,
        description="`rollstream doctor` refuses a server without an append-only file, which forgets the run when it "
        "restarts; false only hints at it.",
    )
    socket_timeout_s: Seconds = Field(30.0, description="A call that takes longer is retried.")

    @property
    def is_embedded(self) -> bool:
        """Whether the run has a private server of its own, which `up` starts."""
        return self.url.get_secret_value() == EMBEDDED


class QueueSettings(Section):
    """Delivery of groups between the stages."""

    lease_s: Annotated[float, Field(ge=0.1, le=86400)] = Field(
        30.0, description="A group whose worker shows no sign of life for this long is taken over."
    )
    max_attempts: Count = Field(3, description="A group that failed this often in one stage goes to dead_letters.")
    max_length: Count = Field(65536, description="Second guard behind admission: a stream never holds more groups.")
    max_payload_bytes: Count = Field(256 * 1024 * 1024, description="Larger messages are refused before decoding.")


class CheckpointSettings(Section):
    """What survives the trainer."""

    every_steps: Natural = Field(50, description="0 writes one only at the end.")
    keep: Count = Field(2, description="Older checkpoints are deleted after a newer one is complete.")
    on_failure: Literal["continue", "stop"] = Field(
        "continue", description="When one cannot be written (disk full): go on to the next, or stop. The last must be."
    )
    resume: str = Field(
        "auto",
        description="auto goes on from the newest complete checkpoint of this run, never begins with the initial "
        "weights; the directory of a checkpoint: begins there, where this run has none of its own yet.",
    )


class WorkerSettings(Section):
    """What all processes have in common."""

    host: str = Field("127.0.0.1", description="Address of /healthz, /readyz and /metrics.")
    port: Port = Field(0, description="0 takes a free port; the fleet registry knows which.")
    heartbeat_s: Seconds = Field(2.0, description="Interval of signs of life.")
    drain_timeout_s: Seconds = Field(30.0, description="After SIGTERM, work in flight has this long to end.")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: console on a terminal, else JSON."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Less severe events are not written."
    )


class AutoscaleSettings(Section):
    """Numbers of workers that `rollstream up --autoscale` chooses."""

    enabled: bool = Field(False, description="The same as `rollstream up --autoscale`.")
    min_generators: Natural = Field(1, description="Never fewer.")
    max_generators: Natural = Field(4, description="Never more: as many as this machine has room for.")
    min_scorers: Natural = Field(1, description="Never fewer.")
    max_scorers: Natural = Field(4, description="Never more.")
    min_teachers: Natural = Field(1, description="Never fewer, in a run that has teachers.")
    max_teachers: Natural = Field(2, description="Never more.")
    min_judges: Natural = Field(1, description="Never fewer, in a run that has judges.")
    max_judges: Natural = Field(4, description="Never more.")
    trainer_idle_high: Fraction = Field(
        0.1, description="A trainer that waits for more of the time: more workers where groups wait for one."
    )
    trainer_idle_low: Fraction = Field(
        0.03, description="One that waits for less: workers leave, one at a time; between the two nothing changes."
    )
    busy_target: Fraction = Field(0.8, description="A worker leaves only if the others are then no busier than this.")
    window_s: Seconds = Field(30.0, description="What is decided from must have been so for this long.")
    cool_down_s: Seconds = Field(60.0, description="After a change of numbers nothing changes for this long.")

    @model_validator(mode="after")
    def _low_is_below_high(self) -> AutoscaleSettings:
        pairs = [(f"min_{role}", f"max_{role}") for role in ("generators", "scorers", "teachers", "judges")]
        for low, high in [*pairs, ("trainer_idle_low", "trainer_idle_high")]:
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)} is above {high} = {getattr(self, high)}; exchange them")
        return self


class ExporterSettings(Section):
    """Metrics that no single worker owns."""

    port: Port = Field(0, description="0 takes a free port.")
    interval_s: Seconds = Field(2.0, description="Redis is read at most this often.")


class TrackingSettings(Section):
    """Records beside metrics.jsonl, which is always written."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field([], description="tensorboard, wandb, trackio.")
    project: str = Field("rollstream", description="Project name for wandb and trackio.")
    samples_per_step: Natural = Field(2, description="Groups written with their completions at every step.")
