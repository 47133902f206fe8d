"""How old tokens are when they are trained on, with real generators that outrun a real trainer.

Scenarios S1, S3, S4 and S5.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines.scripted import ScriptedEngine
from pipeline.keys import Keys, Stream
from pipeline.messages import Completion, RolloutGroup, ScoredGroup
from pipeline.run.data import load_run_data
from pipeline.weights import HostTensor, WeightKind, WeightState
from pipeline.wire import decode
from tests.integration.harness import POLL_S, SCRIPTED, Run, running

Spans = tuple[tuple[tuple[int, int], ...], ...]

# Without a bound a generator would make some 40 groups a second, and the trainer takes 10: on a busy machine, too, the
# one outruns the other.
FAST_GENERATOR = (
    *SCRIPTED,
    "trainer.scripted_step_s=0.4",
    "trainer.max_steps=30",
    "staleness.max_staleness=4",
    "staleness.policy='drop'",
    "generation.max_tokens=96",
    "generation.max_num_seqs=32",
    "generation.scripted.length_mean=24",
    "generation.scripted.length_sigma=0.8",
    "generation.scripted.tokens_per_s=150",
)


class Tap:
    """Looks into the streams behind generators and scorers, and notes the spans of whatever passes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seen: dict[Stream, dict[str, Spans]] = {Stream.ROLLOUTS: {}, Stream.SCORED: {}}

    async def watch(self) -> None:
        """Look for ever. A reader that waits is served as soon as a group is pushed, however short its stay."""
        names = {Keys(self._run.config.run.name).stream(stream).encode(): stream for stream in self.seen}
        last: dict[Any, Any] = dict.fromkeys(names, b"0-0")
        while True:
            found: Any = await self._run.redis.xread(last, block=int(POLL_S * 1000))
            for name, entries in found:
                for last[name], fields in entries:
                    self._note(names[name], fields)

    async def has_caught(self, stream: Stream) -> bool:
        """Whether a group with an update in mid-sequence has passed, or is there now."""
        for _, fields in await self._run.redis.xrange(Keys(self._run.config.run.name).stream(stream)):
            self._note(stream, fields)
        return any(len(spans) > 1 for group in self.seen[stream].values() for spans in group)

    def _note(self, stream: Stream, fields: Mapping[bytes, bytes]) -> None:
        self.seen[stream][fields[b"group_id"].decode()] = _spans(stream, fields[b"payload"])


def _spans(stream: Stream, payload: bytes) -> Spans:
    if stream is Stream.ROLLOUTS:
        rollout = decode(payload, RolloutGroup, max_bytes=1 << 20)
    else:
        rollout = decode(payload, ScoredGroup, max_bytes=1 << 20).rollout
    return tuple(tuple((span.weight_version, span.first_token) for span in item.spans) for item in rollout.completions)


def recorded_spans(sample: Mapping[str, Any]) -> Spans:
    """Spans of a group as the trainer recorded them."""
    return tuple(tuple((version, first) for version, first in item["versions"]) for item in sample["completions"])


def ages(run: Run, step: Mapping[str, float]) -> list[int]:
    """Age of every token of a step, from the recorded spans."""
    trained_at = int(step["weight_version"]) - 1
    found: list[int] = []
    for sample in run.samples:
        for item in sample["completions"] if sample["step"] == step["step"] else ():
            starts = [first for _, first in item["versions"]] + [item["num_tokens"]]
            for (version, first), following in zip(item["versions"], starts[1:], strict=True):
                found += [trained_at - version] * (following - first)
    return found


async def engine_lengths(run: Run, num_groups: int) -> Counter[int]:
    """Lengths that the engine gives the first groups, made here and without any pipeline."""
    generation = run.config.generation
    instant = generation.model_copy(update={"scripted": generation.scripted.model_copy(update={"realtime": False})})
    engine, source = ScriptedEngine(instant, seed=run.config.run.seed), load_run_data(run.config).source
    await engine.start()
    data = memoryview(bytes(8))
    tensors = {"version": HostTensor(dtype="int64", shape=(1,), data=data)}
    await engine.apply_weights(WeightState(weight_version=0, kind=WeightKind.SNAPSHOT, tensors=tensors))
    lengths: Counter[int] = Counter()
    for _ in range(num_groups):
        prompt = source.next_group(0, 0)
        assert prompt is not None
        completions: Sequence[Completion] = await engine.generate(prompt)
        lengths.update(len(completion) for completion in completions)
    await engine.close()
    return lengths


async def test_a_generator_that_outruns_the_trainer_wastes_nothing_and_keeps_the_bound(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *FAST_GENERATOR) as run:
        tap = Tap(run)
        watching = asyncio.create_task(tap.watch())
        run.start_all()
        # Rollouts are gone as soon as they are scored, sooner than a busy machine lets anyone look.
        for stream, taker in ((Stream.ROLLOUTS, run.workers[1]), (Stream.SCORED, run.workers[2])):
            await run.until_stopped([taker], partial(tap.has_caught, stream), f"an update in mid-sequence in {stream}")
            taker.signal(signal.SIGCONT)
        await run.until_over()
        watching.cancel()
        ledger, steps, samples = await run.ledger(), run.steps, run.samples
        assert ledger.dropped.get("stale", 0) < 0.01 * ledger.fed
        assert max(row["staleness_max"] for row in steps) <= 4
        assert np.median([row["staleness_max"] for row in steps]) >= 3, "the trainer was not the bottleneck"

        # Long completions are as frequent among the trained as among the generated (S4).
        lengths = Counter(item["num_tokens"] for sample in samples for item in sample["completions"])
        assert ledger.fed == ledger.trained == 120
        assert lengths == await engine_lengths(run, ledger.fed)
        assert max(lengths) == 96 > 4 * min(lengths)

        # What the engine stamped is what the trainer weighed (S5).
        by_id = {sample["group_id"]: recorded_spans(sample) for sample in samples}
        for seen in tap.seen.values():
            assert all(by_id[group_id] == spans for group_id, spans in seen.items())
        for row in steps:
            assert max(ages(run, row)) == row["staleness_max"]
            assert math.isclose(np.mean(ages(run, row)), row["staleness_mean"], abs_tol=1e-9)


async def test_every_bound_is_reached_and_what_exceeds_it_in_flight_is_handled(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async def run_with(bound: int, policy: str, *settings: str) -> tuple[Run, dict[str, int]]:
        words = [f"staleness.max_staleness={bound}", f"staleness.policy='{policy}'", "trainer.max_steps=16", *settings]
        async with running(tmp_path, valkey_url, f"{run_name}-{bound}", *FAST_GENERATOR, *words) as run:
            run.start_all()
            await run.until_over()
            return run, dict((await run.ledger()).dropped)

    long_tail = (
        "generation.scripted.tokens_per_s=120",
        "generation.scripted.length_sigma=1.2",
        "trainer.groups_per_step=2",
        "trainer.scripted_step_s=0.03",
    )
    (zero, zero_dropped), (one, one_dropped), (eight, eight_dropped) = await asyncio.gather(
        run_with(0, "drop", "trainer.max_steps=8"), run_with(1, "mask", *long_tail), run_with(8, "drop")
    )
    assert {row["staleness_max"] for row in zero.steps} == {0}
    assert max(row["staleness_max"] for row in eight.steps) in {7, 8}
    assert zero_dropped == one_dropped == eight_dropped == {}
    # Long sequences are overtaken by short ones: their first tokens are too old, and only those are masked.
    masked = [row["masked_tokens"] for row in one.steps]
    assert masked == [sum(age > 1 for age in ages(one, row)) for row in one.steps]
    assert 0 < sum(masked) < sum(row["tokens"] for row in one.steps) / 2
