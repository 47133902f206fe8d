"""Whether a teacher reads token ids as the policy writes them.

In: two tokenizers. Out: nothing, or a ModelError that names the first token that they disagree on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from pipeline.config import ModelSettings
from pipeline.errors import ConfigError, ModelError, ScoringError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.engines.openai_asker import Asker

# Letters of several scripts, digits, spaces and code: where tokenizers differ.
_PROBE = "The 12345 quick\tfoxes: {'a': [1, 2]}\n\n  na\u00efve \u4e2d\u6587 \u0440\u0443\u0441\u0441 x_1 += 0.5"
_log = structlog.get_logger("pipeline.teachers")


def check_vocabulary(
    policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, setting: str, model: str
) -> None:
    """Every token of the policy has the same id in the teacher, which may have more. Raises ModelError."""
    ours, theirs = policy.get_vocab(), teacher.get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            there = f"is {theirs[token]} there" if token in theirs else "is not there"
            raise ModelError(
                f"{setting}.model = {model!r} has another vocabulary than the policy: token {token!r}, id {number} "
                f"of model.path, {there}; a teacher must share the policy's tokens (a larger model of its family)"
            )


def check_size(needed: int, rows: int, *, setting: str, model: str) -> None:
    """needed: largest id of the policy, plus one. rows: logits of the teacher. Raises ModelError."""
    if rows < needed:
        raise ModelError(
            f"{setting}.model = {model!r} has logits for {rows} tokens, the policy has ids up to {needed - 1}"
        )


async def check_remote(asker: Asker, policy: ModelSettings, *, setting: str) -> None:
    """A text becomes the same ids at the server. Raises ModelError; a server that cannot be asked is only named."""
    try:
        answer = await asker.post("/tokenize", {"prompt": _PROBE, "add_special_tokens": False})
        theirs = list(answer["tokens"])
    except (ConfigError, ScoringError, LookupError, TypeError) as error:
        _log.warning("vocabulary_not_checked", setting=setting, problem=str(error))
        return
    from pipeline.models.loading import load_tokenizer

    ours = list((await asyncio.to_thread(load_tokenizer, policy)).encode(_PROBE, add_special_tokens=False))
    if ours != theirs:
        differing = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), None)
        what = (
            f"{differing[1]} where the policy has {differing[0]}" if differing else f"{len(theirs)} ids for {len(ours)}"
        )
        raise ModelError(
            f"{setting}.url: the server's model has another vocabulary than the policy: it writes a text with {what}; "
            "a teacher must share the policy's tokens (a larger model of its family)"
        )
