"""Settings: what they are called, what they default to, and where they come from.

In: TOML files, environment and `--set` overrides. Out: one frozen `Config`; a component receives
its own section, never the whole. Unknown keys fail and name the nearest known one.

One module for each part of the way; `Config` puts their sections in data-flow order, and `config.toml`
is rendered from it (`pipeline.settings.files`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from pipeline.config.algorithm import AlgorithmSettings
from pipeline.config.base import Section
from pipeline.config.generation import (
    DataSettings,
    GenerationSettings,
    LoraSettings,
    ModelSettings,
    OpenAiSettings,
    ScriptedSettings,
)
from pipeline.config.learning import EvaluationSettings, StalenessSettings, TrainerSettings
from pipeline.config.run import (
    EMBEDDED,
    AutoscaleSettings,
    CheckpointSettings,
    ExporterSettings,
    QueueSettings,
    RedisSettings,
    RunSettings,
    TrackingSettings,
    WorkerSettings,
)
from pipeline.config.scoring import JudgeSettings, RewardSettings, ScoringSettings, TeacherSettings
from pipeline.config.weights import LOOPBACK, WeightSettings

__all__ = [
    "EMBEDDED",
    "LOOPBACK",
    "AlgorithmSettings",
    "AutoscaleSettings",
    "CheckpointSettings",
    "Config",
    "DataSettings",
    "EvaluationSettings",
    "ExporterSettings",
    "GenerationSettings",
    "JudgeSettings",
    "LoraSettings",
    "ModelSettings",
    "OpenAiSettings",
    "QueueSettings",
    "RedisSettings",
    "RewardSettings",
    "RunSettings",
    "ScoringSettings",
    "ScriptedSettings",
    "Section",
    "StalenessSettings",
    "TeacherSettings",
    "TrackingSettings",
    "TrainerSettings",
    "WeightSettings",
    "WorkerSettings",
]


class Config(Section):
    """All settings of a run, in data-flow order."""

    run: RunSettings = Field(default_factory=RunSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)
    queues: QueueSettings = Field(default_factory=QueueSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    lora: LoraSettings = Field(default_factory=LoraSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    generation: GenerationSettings = Field(default_factory=GenerationSettings)
    scoring: ScoringSettings = Field(default_factory=ScoringSettings)
    staleness: StalenessSettings = Field(default_factory=StalenessSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    weights: WeightSettings = Field(default_factory=WeightSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    autoscale: AutoscaleSettings = Field(default_factory=AutoscaleSettings)
    exporter: ExporterSettings = Field(default_factory=ExporterSettings)
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)

    @property
    def admission_limit(self) -> int:
        """Groups that may be fed and not yet trained, dropped or dead."""
        return (self.staleness.max_staleness + 1) * self.trainer.groups_per_step

    def admission_limit_at(self, step: int) -> int:
        """The same after `step` optimiser steps: near the end no more than the steps that are left can take."""
        if self.trainer.max_steps == 0:
            return self.admission_limit
        return min(self.admission_limit, (self.trainer.max_steps - step) * self.trainer.groups_per_step)

    @property
    def is_colocated(self) -> bool:
        """Whether generation and training take turns on one device."""
        return self.run.topology == "colocated"

    @property
    def merges_lora(self) -> bool:
        """Whether generators serve an adapter as part of the weights below it."""
        return self.lora.rank > 0 and self.generation.merge_lora

    @property
    def run_dir(self) -> Path:
        """Directory of this run's records and checkpoints."""
        return self.run.dir / self.run.name

    @model_validator(mode="after")
    def _compiled_layers_replay_nothing(self) -> Config:
        if self.trainer.compile and self.generation.replay_routing:
            raise ValueError(
                "trainer.compile = true with generation.replay_routing = true: which experts routers take changes from "
                "one micro-batch to the next in a way that compiled layers do not see; set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _quantized_weights_stay_where_they_are(self) -> Config:
        if self.lora.quantization == "none":
            return self
        ways_out = {
            "trainer.num_ranks": self.trainer.num_ranks > 1 and "1",
            "run.topology": self.is_colocated and "'disaggregated'",
            "trainer.compile": self.trainer.compile and "false",
        }
        for name, way_out in ways_out.items():
            if way_out:
                raise ValueError(
                    f"{name} does not go with lora.quantization = {self.lora.quantization!r}, whose weights are "
                    f"neither spread, moved nor compiled; set {name} = {way_out}, or lora.quantization = 'none'"
                )
        return self

    @model_validator(mode="after")
    def _weights_are_not_open_to_all(self) -> Config:
        weights = self.weights
        hosts = {"host": weights.host} | ({"relay_host": weights.relay_host} if weights.relay else {})
        for name, host in hosts.items():
            if host not in LOOPBACK and not weights.insecure and not weights.server_secret_key_file:
                raise ValueError(
                    f"weights.{name} = {host!r} is open to the network: set "
                    "weights.server_secret_key_file (CURVE keys) or weights.insecure = true"
                )
        return self
