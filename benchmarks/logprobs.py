"""Peak memory of one forward and backward pass: logits a chunk at a time against all logits at once, and with the
divergence from a teacher's likeliest ids.

Each measurement runs in a process of its own, which reports how far its memory rose above what it
held when the model was loaded. The same tokens, the same gradient.

    python -m benchmarks.logprobs --json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import report

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from pipeline.batching import MicroBatch

_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How: "chunked", "materialised" or "jsd". tokens: completion tokens in all. vocabulary: ids."""

    how: str
    tokens: int
    vocabulary: int
    sequences: int = 4
    chunk_tokens: int = 256
    top_k: int = 64


def main() -> None:
    """Measure in child processes and report; with --child, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--tokens", type=int, default=4096, help="completion tokens in the batch")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.stdout.write(json.dumps(measure(Case(**json.loads(arguments.child)))) + "\n")
        return
    report("logprobs", compare(arguments.tokens, arguments.vocabulary), as_json=arguments.json)


def compare(tokens: int, vocabulary: int) -> dict[str, float]:
    """Both ways at full size, and the chunked way at half the tokens and half the vocabulary."""
    chunked = in_child(Case(how="chunked", tokens=tokens, vocabulary=vocabulary))
    fewer_tokens = in_child(Case(how="chunked", tokens=tokens // 2, vocabulary=vocabulary))
    fewer_ids = in_child(Case(how="chunked", tokens=tokens, vocabulary=vocabulary // 2))
    jsd, jsd_fewer = (in_child(Case(how="jsd", tokens=size, vocabulary=vocabulary)) for size in (tokens, tokens // 2))
    whole = in_child(Case(how="materialised", tokens=tokens, vocabulary=vocabulary))
    return {
        "logprob_peak_memory_ratio": chunked["peak_bytes"] / whole["peak_bytes"],
        "logprob_time_ratio": chunked["seconds"] / whole["seconds"],
        "loss_difference": abs(chunked["loss"] - whole["loss"]),
        "chunked_peak_bytes": chunked["peak_bytes"],
        "chunked_peak_bytes_half_tokens": fewer_tokens["peak_bytes"],
        "chunked_peak_bytes_half_vocabulary": fewer_ids["peak_bytes"],
        "materialised_peak_bytes": whole["peak_bytes"],
        "jsd_peak_bytes": jsd["peak_bytes"],
        "jsd_peak_bytes_half_tokens": jsd_fewer["peak_bytes"],
        "jsd_time_ratio": jsd["seconds"] / chunked["seconds"],
        "logits_bytes": 4.0 * tokens * vocabulary,
    }


def in_child(case: Case) -> dict[str, float]:
    """One measurement in a fresh process.

    glibc keeps freed blocks of up to 32 MiB; with a fixed threshold they go back to the system, and
    the process's memory is what its tensors hold.
    """
    command = [sys.executable, "-m", "benchmarks.logprobs", "--child", json.dumps(asdict(case))]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def measure(case: Case) -> dict[str, float]:
    """Rise of the process's memory and seconds of one forward and backward pass."""
    import psutil

    model = _model(case.vocabulary)
    logprobs = {"chunked": _chunked, "materialised": _materialised, "jsd": _divergence}[case.how](model, case)
    # One token for each sequence first: kernels are loaded and gradients exist before the measurement.
    logprobs(_batch(case.sequences, case)).sum().backward()  # type: ignore[no-untyped-call]
    batch = _batch(case.tokens, case)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    loss = logprobs(batch).sum() / case.tokens
    loss.backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - started
    return {"peak_bytes": float(_peak_bytes() - before), "seconds": seconds, "loss": loss.item()}


def _peak_bytes() -> int:
    """The most that was resident at once since this program began; what `getrusage` says may be its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) * 1024


def _model(vocabulary: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=65536,
        )
    )


def _chunked(model: LlamaForCausalLM, case: Case) -> Callable[[MicroBatch], Tensor]:
    from pipeline.policy import Policy

    return Policy(model, logprob_chunk_tokens=case.chunk_tokens).logprobs


def _divergence(model: LlamaForCausalLM, case: Case) -> Callable[[MicroBatch], Tensor]:
    from pipeline.algorithms.distillation import generalized_jsd
    from pipeline.policy import Policy

    policy = Policy(model, logprob_chunk_tokens=case.chunk_tokens)

    def divergence(batch: MicroBatch) -> Tensor:
        output, top = policy.evaluate(batch, with_top=True), batch.teacher_top
        assert output.top is not None
        assert top is not None
        return generalized_jsd(top.logprobs, output.top, top.weights, beta=0.5)[0]

    return divergence


def _materialised(model: LlamaForCausalLM, case: Case) -> Callable[[MicroBatch], Tensor]:
    def logprobs(batch: MicroBatch) -> Tensor:
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        rows = logits.flatten(0, 1)[batch.state_index].log_softmax(dim=-1)
        chosen: Tensor = rows.gather(1, batch.targets[:, None])
        return chosen

    return logprobs


def _batch(tokens: int, case: Case) -> MicroBatch:
    """`tokens` completion tokens in `case.sequences` rows of equal length."""
    import torch

    from pipeline.batching import MicroBatch, TeacherTop

    rows, columns = case.sequences, tokens // case.sequences
    length = _PROMPT_TOKENS + columns
    input_ids = torch.randint(case.vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    token_index = torch.arange(rows * columns)
    row, column = token_index // columns, token_index % columns
    blank = torch.zeros(rows, columns)
    ids = torch.arange(case.top_k) * (case.vocabulary // case.top_k)
    top = TeacherTop(
        token_ids=ids.expand(rows * columns, 1, -1),
        logprobs=torch.full((rows * columns, 1, case.top_k), -5.0),
        weights=torch.ones(rows * columns, 1),
    )
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        mask=torch.ones(rows, columns, dtype=torch.bool),
        state_index=row * length + _PROMPT_TOKENS + column - 1,
        token_index=token_index,
        targets=input_ids[row, _PROMPT_TOKENS + column],
        temperatures=torch.ones(rows * columns),
        generator_logprobs=blank,
        advantages=blank,
        factors=blank,
        ages=blank.long(),
        teacher_top=top if case.how == "jsd" else None,
    )


if __name__ == "__main__":
    main()
