"""From a prompt to token ids, through the tokeniser's own chat template.

In: a tokeniser that someone else loaded, a system prompt, a template file. Out: one function from
prompt to ids. Generators never tokenise; what is made here is what the model sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from pipeline.errors import ConfigError, DataError
from pipeline.messages import Prompt

Encode: TypeAlias = Callable[[Prompt], list[int]]


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokeniser."""

    chat_template: str | dict[str, str] | None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokeniser adds by itself."""

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, str]],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> list[int]:
        """Ids of a conversation, up to where the assistant begins to speak."""


def chat_encoder(tokenizer: ChatTokenizer, system_prompt: str = "", chat_template_path: str = "") -> Encode:
    """A function from prompt to ids.

    A text is encoded as it is; where there is a system prompt it becomes the user's message behind
    it. Messages go through the chat template; a system message of their own wins over
    `system_prompt`. Raises ConfigError when the template file cannot be read; the function raises
    ConfigError without a template and DataError when the template refuses the messages.
    """
    from jinja2 import TemplateError  # here: workers without prompts have none of it

    template = _read_template(chat_template_path)

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and not system_prompt:
            return list(tokenizer.encode(prompt))
        if not (template or tokenizer.chat_template):
            raise ConfigError(
                "the prompts are chat messages (or data.system_prompt is set) and the tokenizer has no chat "
                "template: set model.chat_template to a Jinja file, or give prompts as text"
            )
        try:
            return list(
                tokenizer.apply_chat_template(
                    _conversation(prompt, system_prompt),
                    chat_template=template,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
            )
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses the prompt: {error}") from error

    return encode


def _conversation(prompt: Prompt, system_prompt: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _read_template(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template = {path!r} cannot be read ({error}): name a Jinja file, or leave it empty "
            "for the tokenizer's own template"
        ) from error
