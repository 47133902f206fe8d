"""Settings: what they are called, what they default to, and where they come from.

In: TOML files, environment and `--set` overrides. Out: one frozen `Config`; a component receives
its own section, never the whole. Unknown keys fail and name the nearest known one.

The models stand in data-flow order; `config.toml` is rendered from them (`pipeline.settings.files`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

EMBEDDED = "embedded"

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A table of config.toml. Frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


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
        description='"embedded": a private Valkey, for `demo` and `up`; else a redis://, rediss:// or unix:// URL.',
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


class ModelSettings(Section):
    """The policy, the same for generators and trainer."""

    path: str = Field(
        "", description="Directory (or Hub id) of a Hugging Face causal language model and its tokenizer."
    )
    max_context: Natural = Field(0, description="Prompt plus completion, in tokens; 0 takes the model's own limit.")
    chat_template: str = Field("", description="Path of a Jinja file that replaces the tokenizer's chat template.")
    trust_remote_code: bool = Field(
        False, description="Runs code that comes with the model; only for models you trust."
    )
    attention: str = Field(
        "sdpa", description="Attention implementation of transformers, for example flash_attention_2."
    )


class LoraSettings(Section):
    """Low-rank adapters: only they are trained and sent."""

    rank: Natural = Field(0, description="0 trains all weights.")
    alpha: Positive = Field(32.0, description="The adapter's output is scaled by alpha / rank.")
    target_modules: list[str] = Field(["all-linear"], description='Module names, or "all-linear".')
    dropout: Fraction = Field(0.0, description="Dropout on the adapter; above 0 it makes generator and trainer differ.")


class DataSettings(Section):
    """Prompts to train on and prompts held out."""

    path: str = Field("", description="JSONL or parquet file, or a Hub data set id (needs the extra `data`).")
    split: str = Field("train", description="Split of a Hub data set.")
    eval_path: str = Field("", description="Held-out prompts, never trained on; empty for no evaluation.")
    eval_split: str = Field("test", description="Split of a Hub data set for evaluation.")
    prompt_column: str = Field("prompt", description="Text, or a list of {role, content} messages.")
    system_prompt: str = Field("", description="Put in front of every prompt as a system message.")
    shuffle: bool = Field(True, description="A new seeded order in every epoch.")
    epochs: Natural = Field(0, description="Passes over the data; 0 goes on until trainer.max_steps.")
    max_prompt_tokens: Natural = Field(
        0, description="Longer prompts are skipped and counted; 0 takes what the context leaves."
    )


class ScriptedSettings(Section):
    """The engine without a model: for tests, benchmarks and trying out the queues."""

    tokens_per_s: Positive = Field(2000.0, description="Speed of one sequence.")
    length_mean: Positive = Field(64.0, description="Mean completion length in tokens.")
    length_sigma: NonNegative = Field(0.0, description="Spread of the log-normal length; 0 makes all equal.")
    vocab_size: Count = Field(32000, description="Token ids are drawn below this.")
    realtime: bool = Field(True, description="false generates as fast as it can, without waiting.")


class OpenAiSettings(Section):
    """Servers that run already (`vllm serve`), for the engine `openai`. One generator has them for itself."""

    urls: list[str] = Field([], description="Where they are, for example http://gpu1:8000; all serve the same model.")
    model: str = Field("", description="Name under which they serve it; empty takes the only one that they have.")
    api_key_env: str = Field("VLLM_API_KEY", description="Name of the environment variable that holds their API key.")
    stall_s: Seconds = Field(
        60.0,
        description="A server that was asked and yields no token for this long is taken out until it answers; "
        "without any server for this long the generator ends.",
    )
    update_timeout_s: Seconds = Field(
        300.0, description="A server that does not reach a version within this is taken out until it does."
    )


class GenerationSettings(Section):
    """Sampling of completions."""

    engine: Literal["transformers", "scripted", "vllm", "openai"] = Field(
        "transformers",
        description="transformers (CPU or GPU), vllm (needs the extra), openai (vLLM servers that run already) "
        "or scripted (no model).",
    )
    group_size: Count = Field(8, description="Completions for each prompt.")
    max_tokens: Count = Field(256, description="Limit of one completion.")
    temperature: Positive = Field(1.0, description="Accounted for in the importance ratio.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Nucleus sampling; below 1 keep replay_sampling_mask on."
    )
    top_k: Natural = Field(0, description="0 is off.")
    stop: list[str] = Field([], description="Texts that end a completion.")
    replay_sampling_mask: bool = Field(
        True, description="Send which tokens survived top-p/top-k, so that the trainer's probabilities match."
    )
    replay_routing: bool = Field(
        False,
        description="Send which experts each token went to (Qwen3-MoE, OLMoE), so that the trainer uses them too.",
    )
    max_num_seqs: Count = Field(64, description="Sequences decoded at once by one generator.")
    device: str = Field("auto", description='"auto" takes a GPU when there is one; else "cpu", "cuda:0".')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 on GPU, float32 on CPU."
    )
    num_threads: Natural = Field(
        0, description="CPU threads of one generator; 0 leaves it to torch, `up` divides the cores."
    )
    kv_on_update: Literal["keep", "recompute"] = Field(
        "keep",
        description="When weights change in mid-sequence vLLM keeps the keys and values of the tokens so far, "
        "or computes them anew.",
    )
    merge_lora: bool = Field(
        False,
        description="With lora.rank, vllm and openai: merge each adapter into the base weights and serve these, "
        "instead of the adapter. openai needs it.",
    )
    scripted: ScriptedSettings = Field(default_factory=ScriptedSettings)
    vllm: dict[str, Any] = Field(
        {}, description="Engine arguments of vLLM, passed on unchanged: gpu_memory_utilization, tensor_parallel_size."
    )
    openai: OpenAiSettings = Field(default_factory=OpenAiSettings)

    @property
    def needs_sampling_mask(self) -> bool:
        """Whether top_p or top_k cuts tokens away, and which were left is to be replayed."""
        return self.replay_sampling_mask and (self.top_p < 1.0 or self.top_k > 0)


class RewardSettings(Section):
    """One reward function."""

    function: str = Field(
        description='Import path "package.module:function", a file "reward.py:function", or a shipped name.'
    )
    weight: float = Field(1.0, description="Factor in the sum of all rewards.")
    timeout_s: Seconds = Field(30.0, description="A call that takes longer is stopped and counted as a time-out.")
    name: str = Field("", description="Name in metrics and records; defaults to the function's.")
    kwargs: dict[str, str | int | float | bool | list[str]] = Field({}, description="Passed to every call by name.")


class ScoringSettings(Section):
    """Rewards."""

    rewards: list[RewardSettings] = Field([], description="Reward functions; their weighted sum is the reward.")
    num_processes: Count = Field(2, description="Calls that run at once in one scorer, each in a process of its own.")
    on_failure: Literal["unscored", "zero"] = Field(
        "unscored",
        description="A completion whose reward failed or timed out: leave it out of its group, or reward 0.",
    )


class StalenessSettings(Section):
    """How old a sample may be, in weight versions."""

    max_staleness: Natural = Field(
        2,
        description="Versions that generators may run ahead; 0 is synchronous and on-policy, larger overlaps more. "
        "For single tokens a soft bound under policy correct, a hard one under mask and drop.",
    )
    policy: Literal["correct", "mask", "drop"] = Field(
        "correct",
        description="For tokens older than the bound: train on them all the same, importance-corrected (correct), "
        "mask the token, or drop the group.",
    )
    requeue: bool = Field(False, description="The prompt of a dropped group is fed again as a new group.")


class AlgorithmSettings(Section):
    """What the trainer optimises. Empty names take the preset's choice."""

    preset: str = Field("grpo", description="Names an advantage, a loss, a correction and an aggregation: grpo.")
    advantage: str = Field("", description="How rewards become advantages: group_mean_std, group_mean.")
    loss: str = Field("", description="The policy loss: ppo_clip.")
    correction: str = Field("", description="How generator and trainer are reconciled: tis, none.")
    aggregation: str = Field(
        "", description="How token losses become one number: token_mean, sequence_mean, sequence_sum."
    )
    clip_low: Fraction = Field(
        0.2,
        description="The ratio is clipped below 1 - clip_low. Acts with correction none only: with tis, the preset's, "
        "it is 1 at the one update that each batch gets.",
    )
    clip_high: NonNegative = Field(
        0.28, description="The ratio is clipped above 1 + clip_high. Acts as clip_low does, with correction none only."
    )
    truncation: Positive = Field(2.0, description="Cap of the importance weight in truncated importance sampling.")
    kl_coef: NonNegative = Field(
        0.0, description="Weight of the KL divergence to the initial policy; 0 loads no reference."
    )
    drop_zero_variance: bool = Field(False, description="Groups whose rewards are all equal are dropped and replaced.")
    max_refill: Count = Field(
        10, description="Give up when this many batches' worth of groups was filtered for one step."
    )


class TrainerSettings(Section):
    """The optimiser's loop."""

    max_steps: Natural = Field(
        100, description="Stop after this many optimiser steps; 0 goes on to the end of the data."
    )
    groups_per_step: Count = Field(16, description="Groups in one optimiser step.")
    learning_rate: Positive = Field(1e-6, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the learning rate after warm-up."
    )
    warmup_steps: Natural = Field(0, description="Steps of linear warm-up.")
    weight_decay: NonNegative = Field(0.0, description="Decoupled weight decay.")
    beta1: Fraction = Field(0.9, description="AdamW: decay of the mean of the gradients.")
    beta2: Fraction = Field(0.99, description="AdamW: decay of the mean of their squares.")
    max_grad_norm: Positive = Field(1.0, description="Gradients are clipped to this norm.")
    micro_batch_tokens: Count = Field(
        16384, description="Padded tokens in one forward pass; gradients accumulate over passes."
    )
    logprob_chunk_tokens: Count = Field(1024, description="Tokens whose logits exist at once; bounds memory.")
    gradient_checkpointing: bool = Field(False, description="Less memory, one more forward pass.")
    device: str = Field("auto", description='"auto" takes a GPU when there is one; else "cpu", "cuda:0".')
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of forward and backward; master weights stay float32. auto: bfloat16 on GPU.",
    )
    num_threads: Natural = Field(0, description="CPU threads; 0 leaves it to torch, `up` divides the cores.")
    scripted_step_s: NonNegative = Field(
        0.0,
        description="With generation.engine = scripted: seconds that a step of the scripted trainer takes.",
    )


class EvaluationSettings(Section):
    """Held-out prompts, generated by the same pipeline under a stated version."""

    every_steps: Natural = Field(0, description="0 evaluates only where at_start and at_end say so.")
    at_start: bool = Field(True, description="Evaluate the initial weights.")
    at_end: bool = Field(True, description="Evaluate the final weights.")
    num_prompts: Natural = Field(0, description="The first this many held-out prompts; 0 takes all.")
    group_size: Count = Field(1, description="Completions for each held-out prompt.")
    temperature: NonNegative = Field(0.0, description="0 is greedy.")


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
        1024 * 1024, description="Unit of transfer and verification."
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
    max_model_bytes: Count = Field(1 << 42, description="A manifest that claims more is refused.")


class CheckpointSettings(Section):
    """What survives the trainer."""

    every_steps: Natural = Field(50, description="0 writes one only at the end.")
    keep: Count = Field(2, description="Older checkpoints are deleted after a newer one is complete.")
    on_failure: Literal["continue", "stop"] = Field(
        "continue", description="When one cannot be written (disk full): go on to the next, or stop. The last must be."
    )
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto goes on from the newest complete checkpoint of this run."
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


class ExporterSettings(Section):
    """Metrics that no single worker owns."""

    port: Port = Field(0, description="0 takes a free port.")
    interval_s: Seconds = Field(2.0, description="Redis is read at most this often.")


class TrackingSettings(Section):
    """Records beside metrics.jsonl, which is always written."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field([], description="tensorboard, wandb, trackio.")
    project: str = Field("rollstream", description="Project name for wandb and trackio.")
    samples_per_step: Natural = Field(2, description="Groups written with their completions at every step.")


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
    exporter: ExporterSettings = Field(default_factory=ExporterSettings)
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)

    @property
    def admission_limit(self) -> int:
        """Groups that may be fed and not yet trained, dropped or dead."""
        return (self.staleness.max_staleness + 1) * self.trainer.groups_per_step

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
    def _weights_are_not_open_to_all(self) -> Config:
        weights = self.weights
        hosts = {"host": weights.host} | ({"relay_host": weights.relay_host} if weights.relay else {})
        for name, host in hosts.items():
            loopback = host in {"127.0.0.1", "::1", "localhost"}
            if not loopback and not weights.insecure and not weights.server_secret_key_file:
                raise ValueError(
                    f"weights.{name} = {host!r} is open to the network: set "
                    "weights.server_secret_key_file (CURVE keys) or weights.insecure = true"
                )
        return self
