"""A judge in this process: a sequence classifier of transformers, as reward models are.

In: rollouts. Out: the classifier's one logit for each completion. A tokenizer with a chat template gets a
conversation, any other the text of prompt and completion.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from pipeline.config import Config, JudgeSettings, ModelSettings
from pipeline.errors import MessageError, ModelError
from pipeline.judges import text_of
from pipeline.messages import Outcome, Prompt, RewardResult, RolloutGroup
from pipeline.models.files import naming, require_weights
from pipeline.models.loading import (
    load_config,
    load_tokenizer,
    quiet,
    resolve_device,
    resolve_dtype,
)
from pipeline.packing import padded_batches


class Classifier:
    """A `Judge` on a device of this machine."""

    def __init__(self, config: Config, settings: JudgeSettings, setting: str) -> None:
        self.name = settings.title
        self._attention = config.model.attention
        self._settings = settings
        self._setting = setting
        self._model: Any = None
        self._tokenizer: Any = None
        self._context = 0
        self._device = torch.device("cpu")
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Raises ModelError, ConfigError."""
        await asyncio.to_thread(self._load)

    async def away(self) -> str:
        """It is here."""
        return ""

    async def rewards(self, rollout: RolloutGroup) -> list[RewardResult]:
        """See `Judge`."""
        async with self._one_at_a_time:
            values = await asyncio.to_thread(self._values, rollout)
        return [self._result(value) for value in values]

    def _result(self, value: float) -> RewardResult:
        if math.isfinite(value):
            return RewardResult(name=self.name, value=value, outcome=Outcome.OK)
        problem = f"{self._setting}.model gave the logit {value}; try {self._setting}.dtype = 'float32'"
        return RewardResult(name=self.name, value=None, outcome=Outcome.ERROR, problem=problem)

    async def close(self) -> None:
        """Forget the model."""
        self._model = None

    def _load(self) -> None:
        settings = self._settings
        model = ModelSettings(
            path=settings.model, attention=self._attention, trust_remote_code=settings.trust_remote_code
        )
        self._device = resolve_device(settings.device, setting=f"{self._setting}.device")
        with naming(f"{self._setting}.model"):
            self._tokenizer = load_tokenizer(model)
            config = load_config(model)
            require_weights(model)
        if config.num_labels != 1:
            raise ModelError(
                f"{self._setting}.model = {settings.model!r} has {config.num_labels} labels; a reward model is a "
                "sequence classifier with one"
            )
        self._context = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
        dtype = resolve_dtype(settings.dtype, self._device)
        self._model = _load_classifier(model, config, dtype, f"{self._setting}.model").to(self._device).eval()
        if config.pad_token_id is None:
            # The classifier looks for the last token that is no padding; this one is not in use for anything else.
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    @torch.inference_mode()
    def _values(self, rollout: RolloutGroup) -> list[float]:
        rows = [self._ids(rollout.prompt.prompt, item.text) for item in rollout.completions]
        longest = max(map(len, rows), default=0)
        if self._context and longest > self._context:
            raise MessageError(
                f"prompt and completion have {longest} tokens, the context of {self._setting}.model = "
                f"{self._settings.model!r} is {self._context}"
            )
        found: dict[int, float] = {}
        budget = self._settings.batch_tokens if self._model.config.pad_token_id is not None else 1
        for chosen in padded_batches([len(row) for row in rows], budget):
            found |= dict(zip(chosen, self._of_batch([rows[index] for index in chosen]), strict=True))
        return [found[index] for index in range(len(rows))]

    def _of_batch(self, rows: list[list[int]]) -> list[float]:
        width = max(map(len, rows))
        padding = self._model.config.pad_token_id or 0
        ids = torch.full((len(rows), width), padding, dtype=torch.long)  # [B, L]
        attention = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            attention[index, : len(row)] = 1
        logits = self._model(input_ids=ids.to(self._device), attention_mask=attention.to(self._device)).logits  # [B, 1]
        return [float(value) for value in logits.squeeze(1).float().cpu()]

    def _ids(self, prompt: Prompt, completion: str) -> list[int]:
        if self._tokenizer.chat_template:
            before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            conversation = [*before, {"role": "assistant", "content": completion}]
            try:
                said = self._tokenizer.apply_chat_template(conversation, tokenize=False)
            except (TemplateError, LookupError, TypeError, ValueError) as error:
                raise MessageError(
                    f"{self._setting}.model = {self._settings.model!r}: its chat template does not take this "
                    f"conversation: {error}"
                ) from error
            ids = self._tokenizer(said, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(text_of(prompt) + completion)["input_ids"]
        if not ids:
            raise MessageError(f"{self._setting}: prompt and completion are empty")
        return list(ids)


def _load_classifier(model: ModelSettings, config: Any, dtype: torch.dtype, setting: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    try:
        with quiet():
            loaded, info = AutoModelForSequenceClassification.from_pretrained(
                model.path,
                config=config,
                dtype=dtype,
                attn_implementation=model.attention,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{setting} = {Path(model.path).as_posix()!r} is no sequence classifier: {why}") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(
            f"{setting} = {model.path!r} lacks weights for {missing}: it is no sequence classifier, or no whole one"
        )
    return loaded
