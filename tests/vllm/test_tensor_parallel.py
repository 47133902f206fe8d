"""Two tensor-parallel workers, and keys and values that are kept over updates.

Scenarios W6 and S5.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from pipeline.config import Config
from pipeline.engines.vllm import VllmEngine
from pipeline.errors import ConfigError, EngineError, EngineLostError
from tests.engines.conftest import group_of
from tests.tiny import make_tiny_model
from tests.vllm.conftest import Kept, drawn_logprobs, largest_gap, started, trainer_model
from tests.vllm.history import History
from tests.weights.states import until

TOLERANCE = 1e-4

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("untied"), hidden_size=128)


@pytest.fixture(scope="module")
def history(untied: Path) -> History:
    return History(trainer_model(untied), amount=0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(untied: Path, history: History) -> AsyncIterator[Kept]:
    kept = Kept(lambda: started(untied, vllm={"tensor_parallel_size": 2}), history)
    yield kept
    await kept.end()


async def test_each_worker_takes_its_part_of_every_update(engine: VllmEngine, history: History) -> None:
    for number in range(3):
        await engine.apply_weights(history.next())
        group = group_of([5, 6, 7, 8], ordinal=number)
        assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE


async def test_kept_keys_and_values_change_what_follows_and_not_whose_it_is(
    engine: VllmEngine, history: History
) -> None:
    group = group_of([9, 10, 11], ordinal=20, max_tokens=110, group_size=16)
    old = history.newest
    running = asyncio.create_task(engine.generate(group))
    start = engine.num_tokens_generated
    await until(lambda: engine.num_tokens_generated >= start + 300)
    await engine.apply_weights(history.next())
    mixed = [completion for completion in await running if len(completion.spans) == 2]
    assert mixed
    far = []
    for completion in mixed:
        first = completion.spans[1].first_token
        assert [span.weight_version for span in completion.spans] == [old, old + 1]
        before = drawn_logprobs(history.model(old), group, completion)
        after = drawn_logprobs(history.model(old + 1), group, completion)
        assert np.abs(before - completion.generator_logprobs)[:first].max() < TOLERANCE
        far.append(np.abs(after - completion.generator_logprobs)[first:].max())
    assert max(far) > TOLERANCE, "keys and values were computed anew"


async def test_an_update_that_breaks_off_in_several_workers_ends_the_engine(
    last_engine: VllmEngine, history: History
) -> None:
    """Their workers belong to someone else, as they say in the middle of it."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await last_engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"owner": "another"}))
    with pytest.raises(EngineLostError, match=r"another generator gives it weights.*with several workers"):
        await last_engine.apply_weights(history.next())
    with pytest.raises(EngineError, match="apply_weights"):
        await last_engine.generate(group_of([5, 6, 7]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"dtype": "float16"}, r"generation.vllm.dtype = 'float16' is decided by generation.dtype"),
    ],
)
async def test_arguments_that_vllm_or_we_refuse_are_told_by_name(
    untied: Path, given: dict[str, object], said: str
) -> None:
    settings = {
        "model": {"path": str(untied)},
        "generation": {"engine": "vllm", "device": "cpu", "vllm": given},
    }
    engine = VllmEngine(Config.model_validate(settings))
    with pytest.raises(ConfigError, match=said):
        await engine.start()
    await engine.close()
