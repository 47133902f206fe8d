"""A model small enough for every test: a Llama over characters, with tokenizer and chat template.

In: a directory. Out: an ordinary Hugging Face checkpoint in it, made in well under a second and
always the same for the same arguments.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = "abcdefghijklmnopqrstuvwxyz0123456789 =+-*?!.,:\n"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def make_tiny_model(
    directory: Path,
    *,
    tie: bool = False,
    seed: int = 0,
    vocabulary: str = VOCABULARY,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_context: int = 128,
    spread: float = 0.3,
) -> Path:
    """Save a random Llama and its tokenizer; returns the directory.

    tie: output head and embedding are one tensor. spread: standard deviation of the initial weights;
    larger makes sharper distributions.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        initializer_range=spread,
        tie_word_embeddings=tie,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    make_tokenizer(directory, vocabulary)
    return directory


def make_tokenizer(directory: Path, vocabulary: str = VOCABULARY) -> None:
    """Save a tokenizer with one token for each character: ids 0 pad, 1 bos, 2 eos, 3 unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate([*SPECIAL, *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
