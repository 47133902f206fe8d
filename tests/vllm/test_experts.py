"""Mixtures of experts on real vLLM: their weights change with the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import group_of
from tests.moe import make_tiny_moe
from tests.vllm.conftest import largest_gap, started, trainer_model
from tests.vllm.history import History

TOLERANCE = 1e-4

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with heads of 32, whose middle layer has no router."""
    directory = tmp_path_factory.mktemp("moe")
    return make_tiny_moe(directory, hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=2)


async def test_experts_follow_every_update(moe_path: Path) -> None:
    history = History(trainer_model(moe_path))
    async with started(moe_path) as engine:
        for number in range(3):
            await engine.apply_weights(history.next())
            group = group_of([5, 6, 7, 8], ordinal=number)
            assert largest_gap(history.model, group, await engine.generate(group)) < TOLERANCE
