"""The prompts of one run: loaded, tokenised and ordered as the settings say.

In: the configuration. Out: the source of training groups and the makers of evaluation rounds.
Everything wrong with files, columns or lengths is said here, before any worker has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pipeline.config import Config
from pipeline.errors import ConfigError, ModelError
from pipeline.messages import Prompt, PromptGroup, SamplingParams
from pipeline.prompts import (
    CurriculumOrder,
    Dataset,
    Encode,
    Order,
    PromptOrder,
    PromptSource,
    PromptStatistics,
    Row,
    chat_encoder,
    evaluation_groups,
)

if TYPE_CHECKING:
    from pipeline.prompts.encoding import ChatTokenizer

_SCRIPTED_ROWS = 1024
_SCRIPTED_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunData:
    """Training prompts and held-out prompts.

    source: the rows of `training` in feeding order. statistics: what is known of these rows, empty at first.
    held_out: None where data.eval_path is empty.
    """

    config: Config
    training: Dataset
    source: PromptSource
    statistics: PromptStatistics
    held_out: Dataset | None
    encode: Encode
    sampling: SamplingParams
    max_prompt_tokens: int

    def evaluation_groups(self, version: int) -> list[PromptGroup]:
        """One round of held-out prompts to be generated with `version` or newer."""
        if self.held_out is None:
            return []
        return evaluation_groups(
            self.held_out,
            self.encode,
            self.config.evaluation,
            version,
            sampling=self.sampling,
            max_prompt_tokens=self.max_prompt_tokens,
        )


def load_run_data(config: Config, *, max_rows: int | None = None) -> RunData:
    """Load what the trainer feeds, or the first so many rows. Raises ConfigError, DataError, ModelError."""
    encode, max_context = _tokenizer(config)
    sampling = sampling_params(config)
    max_prompt_tokens = _max_prompt_tokens(config, max_context)
    dataset = training_set(config, max_rows=max_rows)
    statistics = PromptStatistics(len(dataset), solved_reward=config.data.solved_reward)
    order = _order(config, statistics)
    held_out = held_out_set(config, max_rows=max_rows)
    check_end(config)
    return RunData(
        config=config,
        training=dataset,
        source=PromptSource(dataset, order, encode=encode, sampling=sampling, max_prompt_tokens=max_prompt_tokens),
        statistics=statistics,
        held_out=held_out,
        encode=encode,
        sampling=sampling,
        max_prompt_tokens=max_prompt_tokens,
    )


def _order(config: Config, statistics: PromptStatistics) -> Order:
    data, seed = config.data, config.run.seed
    order = PromptOrder(len(statistics), seed=seed, shuffle=data.shuffle, epochs=data.epochs)
    if not data.curriculum:
        return order
    return CurriculumOrder(order, statistics, seed=seed, epochs=data.epochs, floor=data.curriculum_floor)


def sampling_params(config: Config) -> SamplingParams:
    """How training completions are sampled."""
    generation = config.generation
    return SamplingParams(
        group_size=generation.group_size,
        max_tokens=generation.max_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop=tuple(generation.stop),
        seed=config.run.seed,
        keep_sampling_mask=generation.replay_sampling_mask,
        keep_routed_experts=generation.replay_routing,
    )


def check_end(config: Config) -> None:
    """Raises ConfigError where nothing would ever end the run."""
    if config.data.epochs == 0 and config.trainer.max_steps == 0:
        raise ConfigError("trainer.max_steps = 0 and data.epochs = 0 would never end: set one of them above 0")


def training_set(config: Config, *, max_rows: int | None = None) -> Dataset:
    """The rows to train on, or the first so many. Raises ConfigError, DataError."""
    if config.data.path:
        return Dataset.load(config.data.path, config.data.split, config.data, max_rows=max_rows)
    if config.generation.engine == "scripted":
        return Dataset(
            "scripted prompts", [Row(number=i + 1, prompt=f"prompt {i}", columns={}) for i in range(_SCRIPTED_ROWS)]
        )
    raise ConfigError('data.path = "": name a JSONL or parquet file, or a Hub data set id')


def held_out_set(config: Config, *, max_rows: int | None = None) -> Dataset | None:
    """The rows to evaluate on, or the first so many; None without any. Raises ConfigError, DataError."""
    if not config.data.eval_path:
        return None
    return Dataset.load(config.data.eval_path, config.data.eval_split, config.data, max_rows=max_rows)


def _tokenizer(config: Config) -> tuple[Encode, int]:
    """Encode function and longest context, in tokens."""
    if config.generation.engine == "scripted":
        return _encode_bytes, config.model.max_context or _SCRIPTED_CONTEXT
    from pipeline.models.loading import context_length, load_config, load_tokenizer

    tokenizer = cast("ChatTokenizer", load_tokenizer(config.model))
    encode = chat_encoder(tokenizer, config.data.system_prompt, config.model.chat_template)
    model = load_config(config.model)
    encode = _embedded(encode, config.model.path, model.get_text_config(decoder=True).vocab_size)
    return encode, context_length(config.model, model)


def _embedded(encode: Encode, path: str, num_embeddings: int) -> Encode:
    """The same, for tokens that the model knows; what lies beyond would be read from elsewhere in its memory."""

    def checked(prompt: Prompt) -> list[int]:
        token_ids = encode(prompt)
        if (highest := max(token_ids, default=0)) >= num_embeddings:
            raise ModelError(
                f"model.path = {path!r}: its tokenizer makes token {highest} of a prompt, and the model has embeddings "
                f"for {num_embeddings}; take the tokenizer that it was trained with, or enlarge its embeddings"
            )
        return token_ids

    return checked


def _encode_bytes(prompt: Prompt) -> list[int]:
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return list(text.encode())


def _max_prompt_tokens(config: Config, max_context: int) -> int:
    room = max_context - config.generation.max_tokens
    if room <= 0:
        raise ConfigError(
            f"generation.max_tokens = {config.generation.max_tokens} leaves no room for a prompt in a context of "
            f"{max_context} tokens: lower it, or raise model.max_context"
        )
    wanted = config.data.max_prompt_tokens
    if wanted > room:
        raise ConfigError(
            f"data.max_prompt_tokens = {wanted} and generation.max_tokens = {config.generation.max_tokens} exceed "
            f"the context of {max_context} tokens: lower one of them"
        )
    return wanted or room
