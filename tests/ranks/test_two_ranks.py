"""A learner on two ranks against the same on one: loss, gradient, weights, checkpoints, adapters (L1, R5)."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoints import Checkpoints
from pipeline.config import CheckpointSettings, Config, TrainerSettings
from pipeline.config.presets import PRESETS
from pipeline.errors import ModelError, RankLostError
from pipeline.learner import PolicyLearner
from pipeline.learner.policy import PolicyLearner as OneRank
from pipeline.messages import ScoredGroup, TopLogprobs
from pipeline.models.weights import tensors_checksum
from pipeline.ranks.place import Place
from pipeline.ranks.world import World
from tests.learning.builders import Row, make_group, random_groups, tiny_llama
from tests.learning.conftest import single_thread
from tests.ranks.pairs import Pair, config_of, two_ranks, variables
from tests.tiny import make_tiny_model

__all__ = ["single_thread"]
pytestmark = pytest.mark.timeout(600)

GROUPS = random_groups(tiny_llama(), noise=0.2)
BOTH = ("fsdp", "ddp")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with two_ranks() as pair:
        yield pair


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def alone(config: Config) -> OneRank:
    return PolicyLearner.create(config)


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], *, tolerance: float = 1e-6) -> None:
    """Weights and moments; the mean of the gradients is, after one step, the clipped gradient."""
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=0, atol=tolerance)
    assert ours["adamw"]["state"].keys() == theirs["adamw"]["state"].keys()
    for index, state in theirs["adamw"]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(ours["adamw"]["state"][index][name], value, rtol=0, atol=tolerance)


def assert_same_step(pair: Pair, config: Config, groups: list[ScoredGroup]) -> dict[str, float]:
    """One step on one rank and on two; returns the metrics of two."""
    one = alone(config)
    expected = one.step(groups, trainer_version=0)
    with pair.learner(config) as two:
        metrics = two.step(groups, trainer_version=0)
        state = two.state_dict()
    balance = metrics.pop("rank_balance")
    assert 0 < balance <= 1
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_close(state, one.state_dict())
    return metrics


@pytest.mark.parametrize(("place", "preset"), [*enumerate(sorted(PRESETS))])
def test_a_step_of_every_preset_is_that_of_one_rank(pair: Pair, model: Path, place: int, preset: str) -> None:
    """Under budgets that leave one rank idle, that make many rounds, and that give one round to both."""
    trainer = {"parallel": BOTH[place % 2], "micro_batch_tokens": (1, 48, 10**6)[place % 3]}
    assert_same_step(pair, config_of(model, algorithm={"preset": preset}, trainer=trainer), GROUPS)


@pytest.mark.parametrize("parallel", BOTH)
@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}},
        {"algorithm": {"kl_coef": 0.1, "correction": "m2po"}, "lora": {"rank": 4}},
    ],
    ids=["kl-in-reward", "lora-m2po"],
)
def test_what_is_seen_of_the_whole_batch_is_gathered_from_both(
    pair: Pair, model: Path, parallel: str, sections: dict[str, Any]
) -> None:
    metrics = assert_same_step(pair, config_of(model, trainer={"parallel": parallel}, **sections), GROUPS)
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("parallel", BOTH)
def test_what_teachers_say_reaches_both_also_where_one_has_nobody_to_learn_from(
    pair: Pair, model: Path, parallel: str
) -> None:
    """The first of two completions has a teacher, and each rank has one of them."""
    top = TopLogprobs(
        token_ids=np.array([[4, 7]] * 3, dtype=np.uint32), logprobs=np.full((3, 2), -1.0, dtype=np.float32)
    )
    taught = Row(token_ids=[4, 7, 5], reward=1.0, teacher_logprobs=[-1.0] * 3, teacher_top=(top,))
    group = make_group([taught, Row(token_ids=[6, 8, 9], reward=0.0)])
    algorithm = {"distillation_coef": 0.5, "jsd_coef": 1.0}
    config = config_of(model, algorithm=algorithm, trainer={"parallel": parallel, "micro_batch_tokens": 1})
    metrics = assert_same_step(pair, config, [group])
    assert metrics["untaught_tokens"] == 3
    assert metrics["teacher_jsd"] > 0
    assert metrics["teacher_top_mass"] == pytest.approx(2 * math.exp(-1))


@pytest.mark.parametrize("parallel", BOTH)
def test_a_rank_without_work_waits_for_nobody(pair: Pair, model: Path, parallel: str) -> None:
    """One completion to train on, three, none at all, and all rewards equal; then a usual step.

    With FSDP the moments are in host memory.
    """
    config = config_of(model, trainer={"parallel": parallel, "offload_optimizer": parallel == "fsdp"})
    single = [make_group([Row(token_ids=[4, 7, 5], reward=1.0), Row(token_ids=[6], reward=0.0, loss_mask=[0])])]
    three = [make_group([Row(token_ids=[4] * n, reward=float(n)) for n in (1, 2, 9)])]
    nothing = [make_group([Row(token_ids=[4], reward=None)])]
    equal = [make_group([Row(token_ids=[4, 5], reward=1.0), Row(token_ids=[6], reward=1.0)])]
    one = alone(config_of(model))
    with pair.learner(config) as two:
        for groups in (single, three, nothing, equal, GROUPS):
            expected, metrics = one.step(groups, trainer_version=0), two.step(groups, trainer_version=0)
            assert metrics["skipped_steps"] == expected["skipped_steps"]
            assert metrics["trained_tokens"] == expected["trained_tokens"]
            assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5, abs=1e-6)
        assert_close(two.state_dict(), one.state_dict(), tolerance=1e-5)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_both(pair: Pair, model: Path) -> None:
    with pair.learner(config_of(model, trainer={"parallel": "ddp"})) as two:
        before = two.state_dict()["weights"]
        handle = two._learner.policy.model.lm_head.weight.register_hook(lambda gradient: gradient * torch.nan)
        assert two.step(GROUPS, trainer_version=0)["skipped_steps"] == 1
        handle.remove()
        torch.testing.assert_close(two.state_dict()["weights"], before, rtol=0, atol=0)
        assert two.step(GROUPS, trainer_version=0)["skipped_steps"] == 0


@pytest.mark.parametrize("parallel", BOTH)
@pytest.mark.parametrize("lora", [{"rank": 0}, {"rank": 4, "dropout": 0.1}], ids=["full", "lora"])
def test_a_run_goes_on_with_another_number_of_ranks(
    pair: Pair, model: Path, tmp_path: Path, parallel: str, lora: dict[str, Any]
) -> None:
    """R5: from one to two and back through checkpoints; weights, moments and the adapter's hash to the last bit.

    Without an adapter the moments are in host memory.
    """
    config = config_of(model, trainer={"parallel": parallel, "offload_optimizer": not lora["rank"]}, lora=lora)
    checkpoints = Checkpoints(tmp_path, CheckpointSettings())
    checkpoints.take_over()
    one = alone(config)
    one.step(GROUPS, trainer_version=0)
    checkpoints.save(1, learner=one.snapshot(), state={})
    first = checkpoints.find("1").learner_state()
    with pair.learner(config) as two:
        two.load_state_dict(first)
        assert_close(two.state_dict(), first, tolerance=0)
        hash_of_one = tensors_checksum(one.export_weights(1).tensors)
        assert tensors_checksum(two.export_weights(1).tensors) == hash_of_one
        two.step(GROUPS, trainer_version=1)
        checkpoints.save(2, learner=two.snapshot(), state={})
        exported = tensors_checksum(two.export_weights(2).tensors)
        two.save_model(tmp_path / "model")
    second = checkpoints.find("2").learner_state()
    with pair.learner(config) as again:
        again.load_state_dict(second)
        assert tensors_checksum(again.export_weights(2).tensors) == exported
    goes_on = alone(config)
    goes_on.load_state_dict(second)
    assert_close(goes_on.state_dict(), second, tolerance=0)
    assert tensors_checksum(goes_on.export_weights(2).tensors) == exported
    (tmp_path / "of_one").mkdir()
    goes_on.save_model(tmp_path / "of_one")
    (file,) = (path.name for path in (tmp_path / "model").glob("*.safetensors"))
    torch.testing.assert_close(
        load_file(tmp_path / "model" / file), load_file(tmp_path / "of_one" / file), rtol=0, atol=0
    )


def test_a_state_of_another_model_is_refused_before_any_rank_loads_it(pair: Pair, model: Path) -> None:
    state = alone(config_of(model, lora={"rank": 4})).state_dict()
    with pair.learner(config_of(model, lora={"rank": 8})) as two:
        with pytest.raises(ModelError, match="the checkpoint is of another model"):
            two.load_state_dict(state)
        assert two.step(GROUPS, trainer_version=0)["grad_norm"] > 0


@pytest.mark.parametrize("parallel", BOTH)
def test_tied_embeddings_stay_one_tensor(pair: Pair, tmp_path: Path, parallel: str) -> None:
    tied = make_tiny_model(tmp_path / "tied", tie=True)
    config = config_of(tied, trainer={"parallel": parallel, "gradient_checkpointing": True})
    assert_same_step(pair, config, GROUPS)


@pytest.mark.parametrize("head_dtype", ["auto", "float32"])
def test_bfloat16_on_two_ranks_is_near_that_on_one(pair: Pair, model: Path, head_dtype: str) -> None:
    """Layers are gathered in bfloat16; what is trained, and what is summed, is float32."""
    config = config_of(model, trainer={"dtype": "bfloat16", "head_dtype": head_dtype})
    one = alone(config)
    expected = one.step(GROUPS, trainer_version=0)
    with pair.learner(config) as two:
        metrics = two.step(GROUPS, trainer_version=0)
        state = two.state_dict()
        exported = two.export_weights(1).tensors
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-2)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert {value.dtype for value in state["weights"].values()} == {torch.float32}
    assert {tensor.dtype for tensor in exported.values()} == {"bfloat16"}


def test_a_rank_does_not_wait_for_ranks_whose_starter_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.ranks.world._STORE_PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(os, "environ", os.environ | variables(1, port))
    with pytest.raises(RankLostError, match=f"nobody answers at 127.0.0.1:{port}"):
        World.join(Place(rank=1, size=2, local_rank=1), TrainerSettings(device="cpu"))
