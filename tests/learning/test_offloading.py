"""A learner that leaves its device between steps, as in a colocated run."""

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
