"""The engine without a model: deterministic, timed, honest about versions."""

from __future__ import annotations

import asyncio
import importlib.metadata
import subprocess
import sys
import time

import numpy as np
import pytest

from pipeline.config import Config, GenerationSettings, ScriptedSettings
from pipeline.engines.registry import create_engine
from pipeline.engines.scripted import ScriptedEngine
from pipeline.errors import ConfigError, EngineError, WeightError
from pipeline.messages import Completion, FinishReason, PromptGroup, RolloutGroup
from pipeline.weights import WeightKind, WeightState
from pipeline.wire import decode, encode
from tests.engines.conftest import group_of


def weights(version: int) -> WeightState:
    """Weights of which only the version counts."""
    return WeightState(weight_version=version, kind=WeightKind.SNAPSHOT, tensors={})


async def started(*, seed: int = 0, max_num_seqs: int = 64, **scripted: float) -> ScriptedEngine:
    """An engine that serves version 0."""
    settings = GenerationSettings(max_num_seqs=max_num_seqs, scripted=ScriptedSettings.model_validate(scripted))
    engine = ScriptedEngine(settings, seed=seed)
    await engine.start()
    await engine.apply_weights(weights(0))
    return engine


def bytes_of(completions: tuple[Completion, ...]) -> list[tuple[bytes, bytes, str]]:
    return [(c.token_ids.tobytes(), c.generator_logprobs.tobytes(), c.text) for c in completions]


def group(ordinal: int = 0, **sampling: int) -> PromptGroup:
    return group_of([1, 2, 3], ordinal=ordinal, **({"max_tokens": 4096} | sampling))


async def test_completions_depend_on_seeds_and_ordinal_alone() -> None:
    fast = await started(realtime=False, length_sigma=0.5)
    slow = await started(realtime=True, tokens_per_s=1e6, length_sigma=0.5)
    assert bytes_of(await fast.generate(group())) == bytes_of(await slow.generate(group()))
    other_ordinal, other_prompt_seed = group(ordinal=1), group(seed=8)
    other_seed = await started(realtime=False, length_sigma=0.5, seed=1)
    for different in (
        await fast.generate(other_ordinal),
        await fast.generate(other_prompt_seed),
        await other_seed.generate(group()),
    ):
        assert bytes_of(different) != bytes_of(await fast.generate(group()))


async def test_lengths_are_log_normal_around_their_mean_and_end_at_the_limit() -> None:
    engine = await started(realtime=False, length_mean=100, length_sigma=0.6)
    completions = await engine.generate(group(group_size=4000, max_tokens=200))
    free = await engine.generate(group(group_size=4000))
    lengths = np.array([len(completion) for completion in free])
    assert abs(lengths.mean() - 100) < 5
    assert abs(np.log(lengths).std() - 0.6) < 0.05
    for completion, wanted in zip(completions, lengths.tolist(), strict=True):
        assert len(completion) == min(wanted, 200)
        assert completion.finish_reason is (FinishReason.LENGTH if wanted > 200 else FinishReason.STOP)


async def test_what_it_makes_passes_the_wire_format() -> None:
    engine = await started(realtime=False, length_sigma=0.3)
    prompt = group()
    rollout = RolloutGroup(prompt=prompt, completions=await engine.generate(prompt), generator="g")
    again = decode(encode(rollout), RolloutGroup)
    assert bytes_of(again.completions) == bytes_of(rollout.completions)


async def test_a_sequence_takes_its_time_and_sequences_beyond_the_slots_wait() -> None:
    engine = await started(max_num_seqs=4, tokens_per_s=1000, length_mean=100)
    started_at = time.monotonic()
    await asyncio.gather(*(engine.generate(group(i, group_size=4)) for i in range(2)))
    assert 0.19 < time.monotonic() - started_at < 20


async def test_an_update_in_mid_sequence_is_where_the_tokens_were_in_time() -> None:
    engine = await started(tokens_per_s=1000, length_mean=4000)  # still going when a busy machine updates it
    task = asyncio.create_task(engine.generate(group()))
    async with asyncio.timeout(60):
        while engine.num_tokens_generated < 400:  # noqa: ASYNC110  time itself is what is waited for
            await asyncio.sleep(0.005)
    made_before = engine.num_tokens_generated // 4
    await engine.apply_weights(weights(1))
    await engine.apply_weights(weights(2))
    made_after = engine.num_tokens_generated // 4
    for completion in await task:
        first, *_, last = completion.spans  # version 1 drew a token where one was due between the two updates
        assert (first.weight_version, first.first_token, last.weight_version) == (0, 0, 2)
        assert made_before <= completion.spans[1].first_token <= last.first_token <= made_after + 1
        assert len(completion.token_versions) == len(completion)


async def test_cancelling_frees_slots_and_tokens_never_fall() -> None:
    engine = await started(max_num_seqs=4, tokens_per_s=100, length_mean=4000)
    tasks = [asyncio.create_task(engine.generate(group(i))) for i in range(2)]
    await asyncio.sleep(0)
    assert engine.num_unfinished_seqs == 8
    before = engine.num_tokens_generated
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert engine.num_unfinished_seqs == 0
    assert engine.num_tokens_generated >= before


async def test_versions_never_go_backwards_and_come_before_the_first_token() -> None:
    engine = ScriptedEngine(GenerationSettings(), seed=0)
    with pytest.raises(EngineError, match="not running"):
        await engine.generate(group())
    await engine.start()
    with pytest.raises(EngineError, match="apply_weights comes first"):
        await engine.generate(group())
    await engine.apply_weights(weights(5))
    with pytest.raises(WeightError, match="older"):
        await engine.apply_weights(weights(4))
    assert engine.weight_version == 5


async def test_a_prompt_without_room_fails_alone() -> None:
    engine = ScriptedEngine(GenerationSettings(scripted=ScriptedSettings(realtime=False)), seed=0, max_context=8)
    await engine.start()
    await engine.apply_weights(weights(0))
    with pytest.raises(EngineError, match="8 tokens leaves nothing to generate in a context of 8"):
        await engine.generate(group_of(list(range(8)), max_tokens=4))
    assert await engine.generate(group_of(list(range(7)), max_tokens=4))


async def test_closing_ends_what_is_in_flight() -> None:
    engine = await started(tokens_per_s=1, length_mean=4000)
    task = asyncio.create_task(engine.generate(group()))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task


def test_an_engine_that_is_not_installed_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match="make setup-vllm"):
        create_engine(Config(generation=GenerationSettings(engine="vllm")))


def test_the_scripted_engine_needs_no_torch() -> None:
    program = (
        "import sys; from pipeline.config import Config, GenerationSettings; "
        "from pipeline.engines.registry import create_engine; "
        "create_engine(Config(generation=GenerationSettings(engine='scripted'))); "
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
