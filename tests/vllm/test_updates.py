"""Updates of full weights on real vLLM: how they come into use, and what goes wrong with them.

Scenarios W4, W6, W7.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from pipeline.engines.shared_weights import SharedWeights
from pipeline.engines.vllm import VllmEngine
from pipeline.errors import EngineError, NonFiniteError, WeightError
from pipeline.weights import WeightState
from tests.engines.conftest import group_of
from tests.vllm.conftest import Kept, largest_gap, started, trainer_model
from tests.vllm.history import History
from tests.weights.states import until

TOLERANCE = 1e-4

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def history(model_path: Path) -> History:
    return History(trainer_model(model_path), amount=0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(model_path: Path, history: History) -> AsyncIterator[Kept]:
    kept = Kept(lambda: started(model_path, kv_on_update="recompute"), history)
    yield kept
    await kept.end()


async def test_weights_that_do_not_fit_leave_the_old_version_serving(engine: VllmEngine, history: History) -> None:
    good = history.state(history.newest)
    name = next(iter(good.tensors))
    missing = replace(good, tensors={key: value for key, value in good.tensors.items() if key != name})
    misshapen = replace(good, tensors={**good.tensors, name: replace(good.tensors[name], shape=(1, 2, 3))})
    older = replace(good, weight_version=history.newest - 1)
    for state, said in ((missing, "missing"), (misshapen, "shape"), (older, "older")):
        with pytest.raises(WeightError, match=said):
            await engine.apply_weights(state)
        assert engine.weight_version == history.newest
    group = group_of([5, 6, 7], ordinal=90)
    assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE


class Torn(SharedWeights):
    """Shared memory whose description is of more than was written."""

    def write(self, state: WeightState) -> dict[str, Any]:
        description = super().write(state)
        description["tensors"][-1][3] += description["size"]
        return description


async def test_an_update_that_breaks_off_stops_the_engine_until_another_heals_it(
    engine: VllmEngine, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight = asyncio.create_task(engine.generate(group_of([5, 6], ordinal=100, max_tokens=120)))
    before = engine.num_tokens_generated
    await until(lambda: engine.num_tokens_generated > before)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_shared", Torn())
        with pytest.raises(WeightError, match="could not apply"):
            await engine.apply_weights(history.next())
    assert engine.weight_version is None
    with pytest.raises(EngineError):
        await in_flight
    with pytest.raises(EngineError, match="apply_weights"):
        await engine.generate(group_of([5, 6], ordinal=101))
    await engine.apply_weights(history.state(history.newest))
    group = group_of([5, 6], ordinal=102)
    completions = await engine.generate(group)
    assert {completion.token_versions[-1] for completion in completions} == {history.newest}
    assert largest_gap(history.model, group, completions) < TOLERANCE


async def test_an_update_goes_through_although_who_asked_for_it_was_cancelled(
    engine: VllmEngine, history: History
) -> None:
    asked = asyncio.create_task(engine.apply_weights(history.next()))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await engine.apply_weights(history.next())  # waits for the one under way
    assert engine.weight_version == history.newest
    group = group_of([5, 6], ordinal=110)
    assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE


async def test_weights_that_are_not_finite_never_reach_what_vllm_has_read(engine: VllmEngine, history: History) -> None:
    """Once in its cache they would come back under later weights: there 0 * nan is added for places not in use."""
    good = history.state(history.newest)
    name = next(name for name in good.tensors if "v_proj" in name)
    bad = np.frombuffer(good.tensors[name].data, dtype=np.float32).copy()
    bad[0] = np.nan
    tensors = good.tensors | {name: replace(good.tensors[name], data=bad.view(np.uint8).data)}
    with pytest.raises(WeightError, match=f"{name} has values that are not finite"):
        await engine.apply_weights(replace(good, weight_version=history.newest + 1, tensors=tensors))
    assert engine.weight_version == history.newest
    group = group_of([5, 6, 7], ordinal=160)
    assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE


@pytest.mark.parametrize("projection", ["v_proj", "k_proj"])
async def test_what_weights_that_overflow_leave_in_the_cache_fails_no_group_of_later_weights(
    engine: VllmEngine, history: History, projection: str
) -> None:
    """Finite, and so large that keys or values are not: groups fail, and leave their blocks to the next ones."""
    good = history.next()
    bad = dict(good.tensors)
    for name, tensor in good.tensors.items():
        if projection in name:
            values = np.frombuffer(tensor.data, dtype=np.float32) * np.float32(1e38)
            bad[name] = replace(tensor, data=values.view(np.uint8).data)
    await engine.apply_weights(replace(good, tensors=bad))
    groups = [group_of([5, 6, 7, 8], ordinal=200 + number) for number in range(12)]
    failed = await asyncio.gather(*(engine.generate(group) for group in groups), return_exceptions=True)
    assert all(isinstance(error, NonFiniteError) for error in failed)
    await engine.apply_weights(history.next())
    for group in groups:
        assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE
