"""Prompts as token ids, with a real tokeniser and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from transformers import AutoTokenizer

from pipeline.errors import ConfigError, DataError
from pipeline.prompts import Dataset, PromptOrder, PromptSource, Row, chat_encoder
from pipeline.prompts.encoding import ChatTokenizer
from tests.prompts.rows import SAMPLING, write
from tests.tiny import make_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz<>="
CHAT = [{"role": "user", "content": "hi"}]


def load(directory: Path) -> ChatTokenizer:
    return cast(ChatTokenizer, AutoTokenizer.from_pretrained(directory))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, LETTERS)
    return load(directory)


def text_of(ids: list[int]) -> str:
    return "".join(LETTERS[index - 4] for index in ids if index >= 4)


def test_text_is_encoded_as_it_is(tokenizer: ChatTokenizer) -> None:
    ids = chat_encoder(tokenizer)("hi")
    assert text_of(ids) == "hi"
    assert all(isinstance(index, int) for index in ids)


def test_messages_go_through_the_template_and_end_where_the_assistant_begins(tokenizer: ChatTokenizer) -> None:
    ids = chat_encoder(tokenizer)(CHAT)
    assert all(isinstance(index, int) for index in ids)
    assert text_of(ids) == "hi="


def test_a_template_file_replaces_the_tokenizers_own(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}<{{ m.content }}>{% endfor %}", encoding="utf-8-sig")
    encode = chat_encoder(tokenizer, "be kind", str(template))
    assert text_of(encode(CHAT)) == "system<bekind>user<hi>"
    assert text_of(encode("hi")) == "system<bekind>user<hi>"
    own = [{"role": "system", "content": "own"}, *CHAT]
    assert text_of(encode(own)) == "system<own>user<hi>"


def test_a_template_that_refuses_names_the_row(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    template = write(tmp_path / "chat.jinja", "{{ raise_exception('no such role') }}")
    rows = Dataset("chats", [Row(number=9, prompt=CHAT, columns={})])
    source = PromptSource(
        rows,
        PromptOrder(1, seed=0),
        encode=chat_encoder(tokenizer, "", template),
        sampling=SAMPLING,
        max_prompt_tokens=9,
    )
    with pytest.raises(DataError, match="chats, row 9: the chat template refuses the prompt: no such role"):
        source.next_group(0, 0)


def test_messages_without_any_template_name_the_setting(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, LETTERS)
    bare = load(tmp_path)
    bare.chat_template = None
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        chat_encoder(bare)(CHAT)


def test_a_template_that_cannot_be_read_names_the_setting(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template = 'absent\.jinja' cannot be read"):
        chat_encoder(tokenizer, "", "absent.jinja")
