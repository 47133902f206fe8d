"""Tokens per second through the pipeline over the bare engine's, on the same prompts.

The bare engine completes all prompts in a process of its own. The pipeline completes them in a
real generator process, fed through a real server and gated by a real weight channel; this process
plays feeder and trainer. Both get the same threads; the two are measured in turn, several times.
For vLLM, the bare engine is its AsyncLLM without any of our code, and the pipeline is measured once
more with new weights every two seconds.

    python -m benchmarks.pipeline --json
    python -m benchmarks.pipeline --engine vllm --json
    python -m benchmarks.pipeline --engine vllm_135m --json
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
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pipeline_cases import CASES, DEFAULT, Case, prepare
from benchmarks.report import report
from pipeline.config import Config
from pipeline.embedded import EmbeddedServer
from pipeline.feeder import prompt_entry, stamped
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.messages import PromptGroup, RolloutGroup
from pipeline.run.data import load_run_data
from pipeline.settings.files import load_config
from pipeline.streams import DropReason, Streams, connect
from pipeline.weights import WeightPublisher
from pipeline.weights.state import WeightState
from pipeline.wire import decode

_READY_S = 300.0
_METRICS = (
    "rollstream_weight_pause_seconds_sum",
    "rollstream_weight_pause_seconds_count",
    "rollstream_busy_seconds_total",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piped:
    """Through the pipeline. pause_s: mean over weight updates. busy_ratio: of the generator while it was measured."""

    tokens_per_s: float
    pause_s: float
    busy_ratio: float


UPDATE_EVERY_S = 2.0


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
    if case.engine != "scripted":
        prompts = directory / "prompts.jsonl"
        overrides += [f"model.path={json.dumps(str(directory / 'model'))}", f"data.path={json.dumps(str(prompts))}"]
    return overrides


def _load(overrides: Sequence[str]) -> Config:
    return load_config([], environ={}, overrides=list(overrides))


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


async def _bare(overrides: Sequence[str], num_groups: int) -> dict[str, float]:
    """The engine alone: tokens_per_s, and for vLLM apply_s, the median of weight updates while it is idle."""
    config = _load(overrides)
    groups = _groups(config, num_groups)
    if config.generation.engine == "vllm":
        from benchmarks.bare_vllm import measure_bare

        return await measure_bare(config, groups, _weights(config))
    from pipeline.engines.registry import create_engine

    engine = create_engine(config)
    await engine.start()
    try:
        await engine.apply_weights(_weights(config))
        await asyncio.gather(*(engine.generate(group) for group in groups[:8]))
        started = time.perf_counter()
        results = await asyncio.gather(*(engine.generate(group) for group in groups))
        seconds = time.perf_counter() - started
    finally:
        await engine.close()
    return {"tokens_per_s": sum(len(completion) for completions in results for completion in completions) / seconds}


async def _through_the_pipeline(overrides: Sequence[str], num_groups: int, update_every_s: float) -> Piped:
    """What arrives on the stream of rollouts. update_every_s: seconds between new weights, 0 for none."""
    config = _load(overrides)
    keys = Keys(config.run.name)
    redis = connect(config.redis)
    streams = Streams(redis, keys, config.queues, consumer="benchmark")
    publisher = WeightPublisher(config.weights)
    await streams.open()
    fleet = Fleet(redis, keys)
    await fleet.set_endpoints(publisher.start())
    weights = _weights(config)
    publisher.publish(weights)
    await fleet.set_version(0)
    generator = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop yet
        [sys.executable, "-m", "pipeline.cli", "generator", *(word for item in overrides for word in ("--set", item))],
        env=_environment(),
    )
    try:
        groups = _groups(config, num_groups)
        warm = [_renamed(group, f"warm-{index}") for index, group in enumerate(groups[:8])]
        await _complete(streams, config, warm)
        before = await _generator_metrics(fleet)
        updating = asyncio.create_task(_update_for_ever(publisher, fleet, weights, update_every_s))
        started = time.perf_counter()
        tokens = await _complete(streams, config, groups)
        seconds = time.perf_counter() - started
        updating.cancel()
        await asyncio.wait([updating])
        if not updating.cancelled():
            updating.result()  # what it failed with
        after = await _generator_metrics(fleet)
        return _piped(tokens, seconds, {name: after[name] - before[name] for name in after})
    finally:
        generator.terminate()
        generator.wait(timeout=60)
        publisher.close()
        await redis.aclose()


async def _update_for_ever(publisher: WeightPublisher, fleet: Fleet, weights: WeightState, every_s: float) -> None:
    """The same weights under ever higher versions."""
    version = 0
    while every_s:
        await asyncio.sleep(every_s)
        version += 1
        await asyncio.to_thread(publisher.publish, dataclasses.replace(weights, weight_version=version))
        await fleet.set_version(version)


async def _generator_metrics(fleet: Fleet) -> dict[str, float]:
    (generator,) = [worker for worker in await fleet.workers() if worker.role == "generator"]

    def read() -> str:
        with urllib.request.urlopen(f"http://{generator.address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return {sample.name: sample.value for family in families for sample in family.samples if sample.name in _METRICS}


def _piped(tokens: int, seconds: float, metrics: dict[str, float]) -> Piped:
    pause_s, num_updates, busy_s = (metrics[name] for name in _METRICS)
    return Piped(
        tokens_per_s=tokens / seconds,
        pause_s=pause_s / num_updates if num_updates else 0.0,
        busy_ratio=busy_s / seconds,
    )


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


def _measure_bare(overrides: Sequence[str], num_groups: int) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.pipeline", "--bare", json.dumps([list(overrides), num_groups])],
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def measure(case: Case, rounds: int) -> dict[str, float]:
    """The median of the ratios, and the worst pair, over `rounds` pairs measured in turn."""
    bare: list[dict[str, float]] = []
    piped: list[Piped] = []
    updated: list[Piped] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            prepare(case, Path(folder))
            bare.append(_measure_bare(_overrides(case, Path(folder), "redis://unused"), case.num_groups))
            piped.append(_measure_piped(case, Path(folder), 0.0))
            if case.engine == "vllm":
                updated.append(_measure_piped(case, Path(folder), UPDATE_EVERY_S))
    pairs = [through.tokens_per_s / alone["tokens_per_s"] for through, alone in zip(piped, bare, strict=True)]
    results = {
        f"{case.name}_ratio": statistics.median(pairs),
        f"{case.name}_ratio_worst": min(pairs),
        f"{case.name}_bare_tokens_per_s": statistics.median(row["tokens_per_s"] for row in bare),
        f"{case.name}_pipeline_tokens_per_s": statistics.median(row.tokens_per_s for row in piped),
    }
    if updated:
        results |= _with_updates(case.name, bare, updated)
    return {name: round(value, 3 if value < 100 else None) for name, value in results.items()}


def _measure_piped(case: Case, folder: Path, update_every_s: float) -> Piped:
    with EmbeddedServer.start() as server:
        overrides = _overrides(case, folder, server.url)
        return asyncio.run(_through_the_pipeline(overrides, case.num_groups, update_every_s))


def _with_updates(name: str, bare: Sequence[dict[str, float]], updated: Sequence[Piped]) -> dict[str, float]:
    rows = list(zip(updated, bare, strict=True))
    return {
        f"{name}_ratio_with_updates": statistics.median(
            row.tokens_per_s / alone["tokens_per_s"] for row, alone in rows
        ),
        "pause_vs_apply": statistics.median(row.pause_s / alone["apply_s"] for row, alone in rows),
        "generator_busy_ratio": statistics.median(row.busy_ratio for row in updated),
        "pause_s": statistics.median(row.pause_s for row in updated),
        "apply_s": statistics.median(row["apply_s"] for row in bare),
    }


def main() -> None:
    """Measure the engines that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--engine", choices=[*(case.name for case in CASES), "all"], default="all", help="all: without vLLM"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs to measure")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        overrides, num_groups = json.loads(arguments.bare)
        print(json.dumps(asyncio.run(_bare(overrides, num_groups))))
        return
    cases = [
        case for case in CASES if case.name == arguments.engine or (arguments.engine == "all" and case.name in DEFAULT)
    ]
    results: dict[str, float] = {}
    for case in cases:
        results |= measure(case, arguments.rounds)
    report("pipeline", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
