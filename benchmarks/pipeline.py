"""Tokens per second through the pipeline over the bare engine's, on the same prompts.

The bare engine completes all prompts in a process of its own. The pipeline completes them in a
real generator process, fed through a real server and gated by a real weight channel; this process
plays feeder and trainer. Both get the same threads; the two are measured in turn, several times.

    python -m benchmarks.pipeline --json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import report
from pipeline.config import Config
from pipeline.config_files import load_config
from pipeline.embedded import EmbeddedServer
from pipeline.feeder import prompt_entry, stamped
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.messages import PromptGroup, RolloutGroup
from pipeline.run_data import load_run_data
from pipeline.streams import DropReason, Streams, connect
from pipeline.weights import WeightPublisher
from pipeline.weights.state import WeightState
from pipeline.wire import decode

_READY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine and how much it has to do."""

    engine: str
    num_groups: int
    overrides: tuple[str, ...]


CASES = {
    "scripted": Case(
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
    "transformers": Case(
        engine="transformers",
        num_groups=96,
        overrides=("generation.max_tokens=64", "generation.max_num_seqs=128", "generation.num_threads=1"),
    ),
}


def _overrides(case: Case, directory: Path, url: str) -> list[str]:
    """Settings of one measurement, for this process and its children."""
    overrides = [
        f"run.dir={json.dumps(str(directory / 'runs'))}",
        f"redis.url={json.dumps(url)}",
        f"generation.engine={json.dumps(case.engine)}",
        "staleness.max_staleness=1000",
        "worker.log_level='warning'",
        *case.overrides,
    ]
    if case.engine == "transformers":
        prompts = directory / "prompts.jsonl"
        overrides += [f"model.path={json.dumps(str(directory / 'model'))}", f"data.path={json.dumps(str(prompts))}"]
    return overrides


def _load(overrides: Sequence[str]) -> Config:
    return load_config([], environ={}, overrides=list(overrides))


def _prepare(case: Case, directory: Path) -> None:
    """A tiny model and prompts of varied length."""
    if case.engine != "transformers":
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeline.demo.task import END, VOCABULARY, save_tokenizer
    from pipeline.models import quiet

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
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


def _groups(config: Config, number: int) -> list[PromptGroup]:
    source = load_run_data(config).source
    groups = []
    for _ in range(number):
        group = source.next_group(0, 0)
        assert group is not None, "the data of a benchmark never ends"
        groups.append(stamped(group, version=0, min_version=0))
    return groups


def _weights(config: Config) -> WeightState:
    from pipeline.learner import load_learner

    return load_learner(config).export_weights(0)


async def _bare(overrides: Sequence[str], num_groups: int) -> float:
    """Tokens per second of the engine alone."""
    config = _load(overrides)
    from pipeline.engines.registry import create_engine

    engine = create_engine(config)
    await engine.start()
    try:
        await engine.apply_weights(_weights(config))
        groups = _groups(config, num_groups)
        await asyncio.gather(*(engine.generate(group) for group in groups[:8]))
        started = time.perf_counter()
        results = await asyncio.gather(*(engine.generate(group) for group in groups))
        seconds = time.perf_counter() - started
    finally:
        await engine.close()
    return sum(len(completion) for completions in results for completion in completions) / seconds


async def _through_the_pipeline(overrides: Sequence[str], num_groups: int) -> float:
    """Tokens per second that arrive on the stream of rollouts."""
    config = _load(overrides)
    keys = Keys(config.run.name)
    redis = connect(config.redis)
    streams = Streams(redis, keys, config.queues, consumer="benchmark")
    publisher = WeightPublisher(config.weights)
    await streams.open()
    fleet = Fleet(redis, keys)
    await fleet.set_endpoints(publisher.start())
    publisher.publish(_weights(config))
    await fleet.set_version(0)
    generator = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop yet
        [sys.executable, "-m", "pipeline.cli", "generator", *(word for item in overrides for word in ("--set", item))],
        env=_environment(),
    )
    try:
        groups = _groups(config, num_groups)
        warm = [_renamed(group, f"warm-{index}") for index, group in enumerate(groups[:8])]
        await _complete(streams, config, warm)
        started = time.perf_counter()
        tokens = await _complete(streams, config, groups)
        return tokens / (time.perf_counter() - started)
    finally:
        generator.terminate()
        generator.wait(timeout=30)
        publisher.close()
        await redis.aclose()


def _renamed(group: PromptGroup, group_id: str) -> PromptGroup:
    return dataclasses.replace(group, group_id=group_id)


async def _complete(streams: Streams, config: Config, groups: Sequence[PromptGroup]) -> int:
    """Feed the groups and take them off the stream of rollouts. Returns their tokens."""
    entries = [prompt_entry(group) for group in groups]
    accepted = await streams.feed(entries, limit=len(groups))
    assert accepted == len(groups), f"only {accepted} of {len(groups)} groups were admitted"
    tokens, remaining = 0, len(groups)
    deadline = time.monotonic() + _READY_S
    while remaining and time.monotonic() < deadline:
        leases = await streams.claim(Stream.ROLLOUTS, remaining, block_s=1.0)
        for lease in leases:
            rollout = decode(lease.payload, RolloutGroup)
            tokens += sum(len(completion) for completion in rollout.completions)
        await streams.drop(leases, DropReason.UNSCORED)
        remaining -= len(leases)
    if remaining:
        raise SystemExit(f"{remaining} groups did not come back in {_READY_S:.0f} s")
    return tokens


def _environment() -> dict[str, str]:
    """One thread for whoever generates, in both measurements."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "ROLLSTREAM_PARENT_PID": str(os.getpid())}


def _measure_bare(overrides: Sequence[str], num_groups: int) -> float:
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.pipeline", "--bare", json.dumps([list(overrides), num_groups])],
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(child.stdout.splitlines()[-1])


def measure(case: Case, rounds: int) -> dict[str, float]:
    """The ratio of medians, and the worst pair, over `rounds` pairs measured in turn."""
    bare, piped = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, EmbeddedServer.start() as server:
            _prepare(case, Path(folder))
            overrides = _overrides(case, Path(folder), server.url)
            bare.append(_measure_bare(overrides, case.num_groups))
            piped.append(asyncio.run(_through_the_pipeline(overrides, case.num_groups)))
    pairs = [through / alone for through, alone in zip(piped, bare, strict=True)]
    return {
        f"{case.engine}_ratio": round(statistics.median(pairs), 3),
        f"{case.engine}_ratio_worst": round(min(pairs), 3),
        f"{case.engine}_bare_tokens_per_s": round(statistics.median(bare)),
        f"{case.engine}_pipeline_tokens_per_s": round(statistics.median(piped)),
    }


def main() -> None:
    """Measure the engines that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--engine", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3, help="pairs to measure")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        overrides, num_groups = json.loads(arguments.bare)
        print(asyncio.run(_bare(overrides, num_groups)))
        return
    cases = list(CASES.values()) if arguments.engine == "all" else [CASES[arguments.engine]]
    results: dict[str, float] = {}
    for case in cases:
        results |= measure(case, arguments.rounds)
    report("pipeline", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
