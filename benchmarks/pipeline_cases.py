"""What `benchmarks.pipeline` measures: engines, models and how much there is to do.

In: a case and a folder. Out: a model with weights drawn at random and prompts of varied length in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama. num_words: of its vocabulary; 0 for as many as the demo's tokenizer has. is_tied: input and output
    embeddings are one."""

    hidden_size: int = 96
    intermediate_size: int = 384
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 4
    num_words: int = 0
    is_tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine, a model and how much they have to do."""

    name: str
    engine: str
    num_groups: int
    overrides: tuple[str, ...]
    shape: Shape = Shape()


_VLLM = ("generation.max_tokens=64", "generation.max_num_seqs=64", "generation.num_threads=1")
CASES = (
    Case(
        name="scripted",
        engine="scripted",
        num_groups=384,
        overrides=(
            "generation.scripted.tokens_per_s=200",
            "generation.scripted.length_mean=96",
            "generation.scripted.length_sigma=0.5",
            "generation.max_tokens=512",
            "generation.max_num_seqs=256",
        ),
    ),
    Case(
        name="transformers",
        engine="transformers",
        num_groups=96,
        overrides=("generation.max_tokens=64", "generation.max_num_seqs=128", "generation.num_threads=1"),
    ),
    Case(
        name="vllm",
        engine="vllm",
        num_groups=384,
        overrides=_VLLM,
        shape=Shape(num_heads=3, num_key_value_heads=3),
    ),
    Case(
        name="vllm_135m",
        engine="vllm",
        num_groups=12,
        overrides=_VLLM,
        shape=Shape(  # of SmolLM2-135M, which the example trains
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_key_value_heads=3,
            num_words=49152,
            is_tied=True,
        ),
    ),
)
DEFAULT = ("scripted", "transformers")  # what needs nothing more to be installed


def prepare(case: Case, directory: Path) -> None:
    """Put model and prompts into `directory`; the scripted engine needs none."""
    if case.engine == "scripted":
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeline.demo.task import END, VOCABULARY, save_tokenizer
    from pipeline.models.loading import quiet

    shape = case.shape
    config = LlamaConfig(
        vocab_size=shape.num_words or len(VOCABULARY),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=VOCABULARY[END],
        pad_token_id=VOCABULARY[END],
    )
    with quiet():
        LlamaForCausalLM(config).save_pretrained(directory / "model")  # type: ignore[no-untyped-call]
    save_tokenizer(directory / "model")
    rows = [json.dumps({"prompt": "abcdefg"[: 3 + index % 5] + ">"}) for index in range(64)]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
