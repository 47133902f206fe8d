"""The task of the demo: "abcdef>" is to be completed to "fedcba".

In: a seed. Out: words, rows of a data set, a tokeniser of characters. The shipped reward
`exact_match` is all that it needs beside.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

ALPHABET = string.ascii_lowercase
WORD_LENGTH = 6
ASK = ">"
END = "<end>"
VOCABULARY = {token: index for index, token in enumerate([END, ASK, *ALPHABET])}

_WORDS_SEED = 20_250_101


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Words of the three stages; no word is in two of them.

    held_out and supervised are the same for every seed, so that every run starts from the same
    model and is measured by the same questions.
    """

    held_out: tuple[str, ...]
    supervised: tuple[str, ...]
    training: tuple[str, ...]


def make_words(*, seed: int, num_held_out: int = 200, num_supervised: int = 8192, num_training: int = 4096) -> Words:
    """Distinct random words."""
    fixed = _distinct_words(random.Random(_WORDS_SEED), num_held_out + num_supervised, frozenset())
    return Words(
        held_out=fixed[:num_held_out],
        supervised=fixed[num_held_out:],
        training=_distinct_words(random.Random(f"{_WORDS_SEED}/{seed}"), num_training, frozenset(fixed)),
    )


def row(word: str) -> dict[str, str]:
    """The word as a row of a data set."""
    return {"prompt": word + ASK, "answer": word[::-1]}


def save_tokenizer(directory: Path) -> None:
    """An ordinary fast tokeniser, one token a character, that AutoTokenizer loads."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=END))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=characters, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    ).save_pretrained(directory)


def _distinct_words(source: random.Random, number: int, taken: frozenset[str]) -> tuple[str, ...]:
    words: dict[str, None] = {}
    while len(words) < number:
        word = "".join(source.choices(ALPHABET, k=WORD_LENGTH))
        if word not in taken:
            words[word] = None
    return tuple(words)
