"""LoRA on real vLLM: an adapter for each version, none for longer than someone needs it.

Scenarios W6 and W9.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio

from pipeline.config import LoraSettings
from pipeline.engines import Interrupted
from pipeline.engines.vllm import VllmEngine
from pipeline.engines.vllm_adapters import AdapterShelf
from pipeline.errors import WeightError
from pipeline.weights.meeting import enter
from tests.engines.conftest import group_of, state_of
from tests.vllm.conftest import Kept, largest_gap, started, trainer_model
from tests.vllm.handover import TOP_K, assert_handed_over, transformers_engine
from tests.vllm.history import History

TOLERANCE = 1e-4
MAX_STALENESS = 1
MEMORY = Path("/dev/shm")
LORA = LoraSettings(rank=8)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def files_of_adapters() -> list[Path]:
    """Of whatever generator of this user."""
    return list(MEMORY.glob(f"rollstream-{os.getuid()}-*/*/*"))


def shelf() -> AdapterShelf:
    """One without adapters, and without a vLLM."""
    return AdapterShelf(SimpleNamespace(vllm_config=SimpleNamespace(lora_config=SimpleNamespace(max_loras=2))), LORA)


@pytest.fixture(scope="module")
def history(model_path: Path) -> History:
    return History(trainer_model(model_path, LORA), amount=0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(model_path: Path, history: History) -> AsyncIterator[Kept]:
    kept = Kept(lambda: started(model_path, lora=LORA, max_staleness=MAX_STALENESS, top_k=TOP_K), history)
    yield kept
    await kept.end()


async def test_what_a_killed_generator_left_is_removed_by_the_next() -> None:
    left = tempfile.mkdtemp(prefix=f"rollstream-{os.getuid()}-", dir=MEMORY)
    os.close(enter(Path(left)))
    shelf().close()
    assert os.path.basename(left) not in os.listdir(MEMORY)


async def test_an_adapter_whose_files_find_no_place_is_refused(history: History) -> None:
    without_place = shelf()
    without_place.close()
    with pytest.raises(WeightError, match="could not load the adapter"):
        await without_place.load(history.next())


async def test_a_new_adapter_changes_the_output_to_the_trainers(engine: VllmEngine, history: History) -> None:
    texts = set()
    for _ in range(3):
        await engine.apply_weights(history.next())
        group = group_of([5, 6, 7, 8])
        completions = await engine.generate(group)
        texts.add(tuple(completion.text for completion in completions))
        assert {completion.spans[0].weight_version for completion in completions} == {history.newest}
        assert largest_gap(history.model, group, completions) < TOLERANCE
    assert len(texts) == 3
    assert engine.num_adapters == 1


async def test_an_adapter_is_read_once_and_leaves_no_file(engine: VllmEngine, history: History) -> None:
    await engine.apply_weights(history.next())
    assert not files_of_adapters()
    for ordinal in range(2):
        group = group_of([5, 6, 7], ordinal=ordinal)
        assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE


async def test_sequences_in_flight_keep_their_adapter_and_are_moved_before_it_is_too_old(
    engine: VllmEngine, history: History
) -> None:
    groups = [group_of([9, 10, 11], ordinal=20 + number, max_tokens=100, group_size=8) for number in range(4)]
    running = [asyncio.create_task(engine.generate(group)) for group in groups]
    before, newest = engine.num_tokens_generated, history.newest
    while not all(task.done() for task in running):
        if engine.num_tokens_generated > before + 150:
            before = engine.num_tokens_generated
            await engine.apply_weights(history.next())
            assert 1 <= engine.num_adapters <= MAX_STALENESS + 2
        await asyncio.sleep(0.005)
    results = [await task for task in running]
    assert history.newest >= newest + 3
    spans = [completion.spans for result in results for completion in result]
    assert max(len(item) for item in spans) >= 2
    # A sequence stays on its adapter until the bound, and is then moved to what is newest.
    assert all(
        later.weight_version - earlier.weight_version == MAX_STALENESS + 1
        for item in spans
        for earlier, later in itertools.pairwise(item)
    )
    for group, result in zip(groups, results, strict=True):
        assert largest_gap(history.model, group, result) < TOLERANCE
    await engine.apply_weights(history.next())
    assert engine.num_adapters == 1


async def test_full_weights_are_refused_where_an_adapter_is_trained(
    engine: VllmEngine, history: History, model_path: Path
) -> None:
    with pytest.raises(WeightError, match="kind snapshot"):
        await engine.apply_weights(state_of(trainer_model(model_path), history.newest + 1))
    group = group_of([5, 6, 7])
    assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE


async def test_what_another_engine_began_goes_on_here(engine: VllmEngine, history: History, model_path: Path) -> None:
    async with transformers_engine(model_path, history.state(history.newest), LORA) as first:
        await assert_handed_over(first, engine, history, ordinal=40)


async def test_what_is_left_here_goes_on_in_another_engine(
    last_engine: VllmEngine, history: History, model_path: Path
) -> None:
    async with transformers_engine(model_path, history.state(history.newest), LORA) as second:
        await assert_handed_over(last_engine, second, history, ordinal=50)
    with pytest.raises(Interrupted):
        await last_engine.generate(group_of([5, 6], ordinal=60))
