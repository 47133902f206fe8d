"""Settings on the way from a dataset's row to a group of completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    PositiveFactor,
    Seconds,
    Section,
    Threads,
)


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
    alpha: PositiveFactor = Field(32.0, description="The adapter's output is scaled by alpha / rank.")
    target_modules: list[str] = Field(["all-linear"], description='Module names, or "all-linear".')
    dropout: Fraction = Field(0.0, description="Dropout on the adapter; above 0 it makes generator and trainer differ.")
    quantization: Literal["none", "nf4"] = Field(
        "none",
        description="nf4: the weights below the adapter in 4 bits (QLoRA), in the trainer and in engine transformers; "
        "needs rollstream[qlora].",
    )

    @model_validator(mode="after")
    def _something_is_trained(self) -> LoraSettings:
        if self.quantization != "none" and not self.rank:
            raise ValueError(
                f"quantization = {self.quantization!r} with rank = 0: weights in 4 bits cannot be trained, only an "
                "adapter above them; set rank, 16 is usual, or quantization = 'none'"
            )
        return self


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
    curriculum: bool = Field(
        False,
        description="After the first pass prompts are drawn by what is known of them, those that are solved at times "
        "more often than those that are solved always or never; a pass is then as many groups as there are rows.",
    )
    curriculum_floor: PositiveFactor = Field(
        0.05,
        description="Weight of a prompt that is always or never solved; one that is solved half the time has "
        "0.25 more.",
    )
    solved_reward: PositiveFactor = Field(
        1.0, description="Mean reward of a group that counts as solved: the largest that the rewards give."
    )
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
    temperature: PositiveFactor = Field(1.0, description="Accounted for in the importance ratio.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Nucleus sampling; below 1 keep replay_sampling_mask on."
    )
    top_k: Natural = Field(0, description="0 is off.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="Texts that end a completion.")
    replay_sampling_mask: bool = Field(
        True, description="Send which tokens survived top-p/top-k, so that the trainer's probabilities match."
    )
    replay_routing: bool = Field(
        False,
        description="Send which experts each token went to (Qwen3-MoE, OLMoE), so that the trainer uses them too.",
    )
    save_every_tokens: Natural = Field(
        256,
        description="What a generator has of a completion is saved whenever it has grown by so much, so that no more "
        "is lost when it is killed; 0 saves only when it leaves.",
    )
    max_num_seqs: Count = Field(64, description="Sequences decoded at once by one generator.")
    device: str = Field("auto", description='"auto" takes a GPU when there is one; else "cpu", "cuda:0".')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 on GPU, float32 on CPU."
    )
    num_threads: Threads = Field(
        0, description="CPU threads of one generator; 0 leaves it to torch, `up` divides the cores."
    )
    stall_s: Seconds = Field(
        300.0,
        description="A generator whose engine has sequences and draws no token for this long ends; others go on "
        "with its groups.",
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
