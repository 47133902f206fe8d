"""LoRA on real vLLM, merged into the weights below it; and generators that fail to apply, or die.

Scenarios W5, W6, W7 and W9.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from pipeline.config import Config, LoraSettings
from pipeline.engines.vllm import VllmEngine
from pipeline.errors import EngineLostError
from tests.engines.conftest import group_of
from tests.vllm.conftest import Kept, largest_gap, started, trainer_model
from tests.vllm.generators import generating
from tests.vllm.handover import transformers_engine
from tests.vllm.history import History
from tests.weights.states import until

TOLERANCE = 1e-4
# Of the modules that vLLM fuses only one each is adapted, and the embeddings are never given again.
LORA = LoraSettings(rank=8, target_modules=["v_proj", "down_proj", "gate_proj"])

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def history(model_path: Path) -> History:
    return History(trainer_model(model_path, LORA), amount=0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(model_path: Path, history: History) -> AsyncIterator[Kept]:
    kept = Kept(lambda: started(model_path, lora=LORA, merge_lora=True, kv_on_update="recompute"), history)
    yield kept
    await kept.end()


async def test_merged_adapters_give_the_trainers_logprobs(engine: VllmEngine, history: History) -> None:
    texts = set()
    for _ in range(3):
        await engine.apply_weights(history.next())
        group = group_of([5, 6, 7, 8])
        completions = await engine.generate(group)
        texts.add(tuple(completion.text for completion in completions))
        assert {completion.token_versions[0] for completion in completions} == {history.newest}
        assert largest_gap(history.model, group, completions) < TOLERANCE
    assert len(texts) == 3
    assert engine.num_adapters == 0


async def test_sequences_in_flight_go_on_with_the_newly_merged(engine: VllmEngine, history: History) -> None:
    groups = [group_of([9, 10, 11], ordinal=20 + number, max_tokens=110, group_size=8) for number in range(2)]
    old, before = history.newest, engine.num_tokens_generated
    running = [asyncio.create_task(engine.generate(group)) for group in groups]
    await until(lambda: engine.num_tokens_generated > before + 100)
    await engine.apply_weights(history.next())
    results = [await task for task in running]
    spans = [[span.weight_version for span in completion.spans] for result in results for completion in result]
    assert [old, old + 1] in spans
    for group, result in zip(groups, results, strict=True):
        assert largest_gap(history.model, group, result) < TOLERANCE


async def test_a_generator_that_fails_to_apply_holds_up_no_other_and_labels_nothing_falsely(
    engine: VllmEngine, history: History, model_path: Path, valkey_url: str, run_name: str
) -> None:
    """Its workers belong to someone else for a while, as they say in the middle of an update."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    settings = {
        "run": {"name": run_name},
        "redis": {"url": valkey_url},
        "weights": {"poll_s": 0.2},
        "lora": LORA.model_dump(),
        "generation": {"group_size": 4, "max_num_seqs": 32},
    }
    old = history.newest
    async with (
        transformers_engine(model_path, history.state(old), LORA) as other,
        generating(Config.model_validate(settings), {"vllm": engine, "other": other}, history.state(old)) as run,
    ):
        while {rollout.generator for rollout in await run.complete(24)} != {"vllm", "other"}:
            continue
        taken = WeightTransferInitRequest(init_info={"owner": "another"})
        await engine._llm.init_weight_transfer_engine(taken)
        await run.publish(history.next())
        async with asyncio.timeout(30):
            while engine.weight_version is not None or other.weight_version == old:
                await run.complete(2)
        assert run.contexts["vllm"].metrics.weight_failures_total._value.get() >= 1
        assert not run.contexts["vllm"].state.is_ready
        proceeded = await run.complete(8)
        assert {rollout.generator for rollout in proceeded} == {"other"}
        await give_up(engine)
        await until(lambda: engine.weight_version == old + 1)
        while "vllm" not in {rollout.generator for rollout in await run.complete(24)}:
            continue
        for rollout in run.rollouts:
            whole = tuple(completion for completion in rollout.completions if len(completion.spans) == 1)
            assert len(whole) == len(rollout.completions) or rollout.generator == "other", "it keeps keys and values"
            assert largest_gap(history.model, rollout.prompt, whole) < 10 * TOLERANCE, "another version's"
        versions = {rollout.generator: rollout.completions[0].spans[0].weight_version for rollout in run.rollouts}
        assert versions == {"vllm": old + 1, "other": old + 1}


async def give_up(engine: VllmEngine) -> None:
    """Its workers belong to nobody then. vLLM refuses that in the middle of an update."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(Exception):
                await engine._llm.shutdown_weight_transfer_engine()
                return


async def test_a_vllm_that_dies_ends_what_is_in_flight_and_says_so(last_engine: VllmEngine) -> None:
    before = last_engine.num_tokens_generated
    running = asyncio.create_task(last_engine.generate(group_of([5, 6], ordinal=30, max_tokens=120)))
    await until(lambda: last_engine.num_tokens_generated > before)
    for child in psutil.Process().children(recursive=True):
        if "VLLM" in " ".join(child.cmdline()) or "VLLM" in child.name():
            child.kill()
    async with asyncio.timeout(60):
        with pytest.raises(EngineLostError, match="vLLM has ended"):
            await running
        with pytest.raises(EngineLostError):
            await last_engine.generate(group_of([5, 6], ordinal=31))
