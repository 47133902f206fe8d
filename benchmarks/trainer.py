"""What the trainer's own work costs: its step against plain transformers, and what layouts of micro-batches gain.

One thread, pairs in turn. Rates are tokens of prompts and completions a second of processor time, so
what else the machine does is left out as far as it can be.

    python -m benchmarks.trainer --json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import logprobs
from benchmarks.report import report
from pipeline.messages import (
    Completion,
    FinishReason,
    PromptGroup,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    VersionSpan,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from pipeline.learner import PolicyLearner

_GROUP_SIZE = 8
_SHORT_SHARE = 16  # a short completion of the mix has so many times fewer tokens than a long one
_STEP_ROWS = 4  # sequences in a step that is held against plain transformers
_STEP_CHUNKS = 4  # of logits, where it does not have them all at once
_NUM_IDS = 256  # token ids are below

# Ids for each unit of width: where the whole step is measured the output layer is a fifth of the model, as in one
# of half a billion parameters; where layouts are, which it does not see, a tenth, as in one of several billions.
_STEP_VOCABULARY, _LAYOUT_VOCABULARY = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """hidden, layers: of the model whose whole step is measured; layouts are compared on half of each.

    length: tokens of a sequence. rounds: pairs. memory_tokens, memory_vocabulary: for the peak of memory.
    """

    hidden: int
    layers: int
    length: int
    rounds: int
    memory_tokens: int
    memory_vocabulary: int


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model, a multiple of 128")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence, a multiple of 32")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each comparison")
    parser.add_argument("--memory-tokens", type=int, default=4096, help="0 leaves the memory out")
    parser.add_argument("--memory-vocabulary", type=int, default=32768)
    arguments = parser.parse_args()
    if min(arguments.hidden, arguments.length) < 1 or arguments.hidden % 128 or arguments.length % 32:
        parser.error("--hidden must be a multiple of 128, --length one of 32")
    if min(arguments.rounds, arguments.layers) < 1:
        parser.error("--rounds and --layers must be at least 1")
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    report("trainer", measure(Size(**options)), as_json=arguments.json)


def measure(size: Size) -> dict[str, object]:
    """All figures, the memory of log-probabilities last, in processes of their own."""
    import torch

    torch.set_num_threads(1)
    return {**_against_plain(size), **_packing(size), **_sharing(size), **_memory(size)}


def _against_plain(size: Size) -> dict[str, object]:
    """Sequences of one length, with nothing to pad and nothing to share: plain transformers at its best."""
    import torch

    group_lengths = [size.length - 1] * _STEP_ROWS
    groups = [_group(0, 1, group_lengths)]
    model = _model(size.hidden, size.layers, _STEP_VOCABULARY)
    num_tokens = _STEP_ROWS * size.length
    learner, in_chunks = _learner(model, "shared"), _learner(model, "shared", num_tokens // _STEP_CHUNKS)
    plain = _model(size.hidden, size.layers, _STEP_VOCABULARY)
    rows = [
        np.concatenate([groups[0].rollout.prompt.prompt_token_ids, item.token_ids])
        for item in groups[0].rollout.completions
    ]
    input_ids = torch.from_numpy(np.stack(rows).astype(np.int64))
    one_row = input_ids.flatten()[None]
    positions = torch.arange(size.length).repeat(_STEP_ROWS)[None]

    def padded() -> None:
        plain.zero_grad()
        plain(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()

    def packed() -> None:
        plain.zero_grad()
        plain(input_ids=one_row, position_ids=positions, labels=one_row, use_cache=False).loss.backward()

    def ours() -> None:
        _accumulate(learner, groups)

    def ours_in_chunks() -> None:
        _accumulate(in_chunks, groups)

    best = _compare(ours, padded, size.rounds)
    return {
        "step_vs_plain_hf": round(statistics.median(best.ratios), 3),
        "step_vs_plain_hf_worst": round(min(best.ratios), 3),
        "step_vs_plain_hf_one_row": round(statistics.median(_compare(ours, packed, size.rounds).ratios), 3),
        "step_vs_plain_hf_chunked": round(statistics.median(_compare(ours_in_chunks, padded, size.rounds).ratios), 3),
        "step_tokens_per_s": round(num_tokens / best.ours_s, 1),
        "plain_hf_tokens_per_s": round(num_tokens / best.theirs_s, 1),
    }


def _packing(size: Size) -> dict[str, object]:
    """In each group one completion is long and seven are short."""
    long, short = 2 * size.length, 2 * size.length // _SHORT_SHARE
    groups = [_group(ordinal, short // 2, [long] + [short] * (_GROUP_SIZE - 1)) for ordinal in range(_GROUP_SIZE)]
    found, rows = _layouts(size, groups, "packed", "padded")
    return {
        "packed_vs_padded": round(statistics.median(found.ratios), 3),
        "packed_vs_padded_worst": round(min(found.ratios), 3),
        "packed_vs_padded_tokens": round(rows[1]["forward_tokens"] / rows[0]["forward_tokens"], 3),
        "padding_ratio": round(rows[1]["padding_tokens"] / rows[1]["forward_tokens"], 3),
    }


def _sharing(size: Size) -> dict[str, object]:
    """Prompts as long as completions, neither padded."""
    half = size.length // 2
    groups = [_group(ordinal, half, [half] * _GROUP_SIZE) for ordinal in range(2)]
    found, rows = _layouts(size, groups, "shared", "packed")
    return {
        "prefix_sharing_speedup": round(statistics.median(found.ratios), 3),
        "prefix_sharing_speedup_worst": round(min(found.ratios), 3),
        "prefix_sharing_tokens": round(rows[1]["forward_tokens"] / rows[0]["forward_tokens"], 3),
    }


def _memory(size: Size) -> dict[str, object]:
    if not size.memory_tokens:
        return {}
    peaks = [
        logprobs.in_child(logprobs.Case(how=how, tokens=size.memory_tokens, vocabulary=size.memory_vocabulary))
        for how in ("chunked", "materialised")
    ]
    return {"logprob_peak_memory_ratio": round(peaks[0]["peak_bytes"] / peaks[1]["peak_bytes"], 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """ratios: of each pair, their seconds over ours: above 1 ours is faster. ours_s, theirs_s: medians."""

    ratios: list[float]
    ours_s: float
    theirs_s: float


def _compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> Pairs:
    """Each once to warm up, then pairs, by turns the one first and the other."""
    for run in (ours, theirs):
        run()
    seconds: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    for number in range(rounds):
        for run in (ours, theirs) if number % 2 else (theirs, ours):
            started = time.process_time()
            run()
            seconds[run].append(time.process_time() - started)
    return Pairs(
        ratios=[their / our for our, their in zip(seconds[ours], seconds[theirs], strict=True)],
        ours_s=statistics.median(seconds[ours]),
        theirs_s=statistics.median(seconds[theirs]),
    )


def _layouts(
    size: Size, groups: Sequence[ScoredGroup], one: str, other: str
) -> tuple[Pairs, tuple[dict[str, float], dict[str, float]]]:
    """The same step in two layouts, and what each puts through the model."""
    hidden, layers = size.hidden // 2, max(1, size.layers // 2)
    first, second = (_learner(_model(hidden, layers, _LAYOUT_VOCABULARY), layout) for layout in (one, other))
    rows = _accumulate(first, groups), _accumulate(second, groups)
    pairs = _compare(lambda: _accumulate(first, groups), lambda: _accumulate(second, groups), size.rounds)
    return pairs, rows


def _accumulate(learner: PolicyLearner, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Loss and gradient of a step, from groups as they arrive to the metrics that are written down."""
    learner.policy.model.zero_grad()
    _, metrics = learner.accumulate(groups, trainer_version=0)
    return metrics


def _model(hidden: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    """vocabulary: ids for each unit of width."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=vocabulary * hidden,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            max_position_embeddings=8192,
        )
    )


def _learner(model: LlamaForCausalLM, layout: str, chunk_tokens: int | None = None) -> PolicyLearner:
    """chunk_tokens: None is the default of the settings."""
    from pipeline.batching import Layout
    from pipeline.config import AlgorithmSettings, StalenessSettings, TrainerSettings
    from pipeline.learner.policy import PolicyLearner
    from pipeline.policy import Policy

    trainer = TrainerSettings.model_validate({})
    policy = Policy(model, logprob_chunk_tokens=chunk_tokens or trainer.logprob_chunk_tokens, layout=Layout(layout))
    algorithm = AlgorithmSettings.model_validate({})
    return PolicyLearner(policy, algorithm=algorithm, trainer=trainer, staleness=StalenessSettings())


def _group(ordinal: int, num_prompt: int, lengths: Sequence[int]) -> ScoredGroup:
    """Random ids, with completions of these lengths and rewards that differ."""
    random = np.random.default_rng(ordinal)
    prompt = PromptGroup(
        group_id=f"{ordinal:08d}",
        ordinal=ordinal,
        dataset_index=ordinal,
        epoch=0,
        prompt="",
        prompt_token_ids=random.integers(1, _NUM_IDS, num_prompt).astype(np.uint32),
        columns={},
        sampling=SamplingParams(group_size=len(lengths), max_tokens=max(lengths)),
        fed_version=0,
        min_version=0,
    )
    completions = tuple(
        Completion(
            token_ids=random.integers(1, _NUM_IDS, length).astype(np.uint32),
            generator_logprobs=np.full(length, -9.0, dtype=np.float32),
            loss_mask=np.ones(length, dtype=np.uint8),
            spans=(VersionSpan(weight_version=0, first_token=0),),
            finish_reason=FinishReason.STOP,
            text="",
        )
        for length in lengths
    )
    rollout = RolloutGroup(prompt=prompt, completions=completions, generator="generator-0")
    scores = tuple(Score(reward=float(index % 2)) for index in range(len(lengths)))
    return ScoredGroup(rollout=rollout, scores=scores, scorer="scorer-0")


if __name__ == "__main__":
    main()
