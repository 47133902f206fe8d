"""A learner that leaves its device between steps, as in a colocated run, and moments that are never there for long."""

from __future__ import annotations

import torch

from tests.learning.builders import make_learner, random_groups, tiny_llama


def test_a_learner_that_left_its_device_trains_on_as_if_it_had_stayed() -> None:
    groups = random_groups(tiny_llama(1), temperature=0.8, noise=0.4)
    stays, leaves = make_learner(tiny_llama(1)), make_learner(tiny_llama(1))
    for version in range(3):
        stays.step(groups, trainer_version=version)
        leaves.step(groups, trainer_version=version)
        leaves.leave_device()
        # There is no second device here; what is moved is looked at all the same.
        leaves.policy.move(torch.device("cpu"))
        leaves._optimizer.move(torch.device("cpu"))
    ours, theirs = leaves.state_dict(), stays.state_dict()
    torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=0)
    torch.testing.assert_close(ours["adamw"], theirs["adamw"], rtol=0, atol=0)


def test_moments_in_host_memory_change_nothing_and_go_with_any_checkpoint() -> None:
    groups = random_groups(tiny_llama(1), temperature=0.8, noise=0.4)
    settings: dict[str, object] = {"weight_decay": 0.1, "offload_optimizer": True}
    stays, away = (
        make_learner(tiny_llama(1), trainer={"weight_decay": 0.1}),
        make_learner(tiny_llama(1), trainer=settings),
    )
    for version in range(2):
        expected, metrics = (learner.step(groups, trainer_version=version) for learner in (stays, away))
        assert metrics == expected
    exchanged = make_learner(tiny_llama(2), trainer=settings), make_learner(tiny_llama(2))
    for learner, other in zip(exchanged, (stays, away), strict=True):
        learner.load_state_dict(other.state_dict())
    away.leave_device()
    for learner in (stays, away, *exchanged):
        learner.step(groups, trainer_version=2)
    for learner in (away, *exchanged):
        torch.testing.assert_close(learner.state_dict()["weights"], stays.state_dict()["weights"], rtol=0, atol=0)
        ours, theirs = learner.state_dict()["adamw"], stays.state_dict()["adamw"]
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)  # type: ignore[index]
