"""From groups to padded tensors: the ids that were generated, at the right places, within the budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batching import Sample, make_samples, pad, split
from pipeline.config import StalenessSettings
from pipeline.errors import MessageError
from pipeline.messages import ScoredGroup
from pipeline.staleness import assess
from pipeline.wire import decode, encode
from tests.learning.builders import Row, make_group


def samples_of(*groups: ScoredGroup, version: int = 0, policy: str = "correct", bound: int = 0) -> list[Sample]:
    settings = StalenessSettings.model_validate({"policy": policy, "max_staleness": bound})
    return make_samples(groups, [assess(group, version, settings) for group in groups])


def test_token_ids_trained_are_the_token_ids_generated() -> None:
    """L5: through the wire and into the tensors, though the text of the completion says otherwise."""
    group = make_group([Row(token_ids=[4, 4, 9]), Row(token_ids=[7])], prompt=[1, 5])
    samples = samples_of(decode(encode(group), ScoredGroup))

    batch = pad(samples, [torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2.0])], torch.tensor([0.5, 0.25]))

    np.testing.assert_array_equal(batch.input_ids.numpy(), [[1, 5, 4, 4, 9], [1, 5, 7, 0, 0]])
    np.testing.assert_array_equal(batch.attention_mask.numpy(), [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(batch.targets.numpy(), [4, 4, 9, 7])
    np.testing.assert_array_equal(batch.state_index.numpy(), [1, 2, 3, 6])
    np.testing.assert_array_equal(batch.token_index.numpy(), [0, 1, 2, 3])
    np.testing.assert_array_equal(batch.advantages.numpy(), [[1, 3, 5], [2, 0, 0]])
    np.testing.assert_array_equal(batch.factors.numpy(), [[0.5, 0.5, 0.5], [0.25, 0, 0]])


def test_mask_leaves_out_what_must_not_be_trained_on() -> None:
    rows = [
        Row(token_ids=[4, 4, 4], loss_mask=[1, 0, 1]),
        Row(token_ids=[4, 4], reward=None),
        Row(token_ids=[4, 4], generator_logprobs=[float("nan"), -1.0]),
        Row(token_ids=[4, 4], spans=((0, 0), (1, 1))),
    ]

    samples = samples_of(make_group(rows), version=1, policy="mask", bound=0)
    fresh = samples_of(make_group(rows), version=1, policy="correct", bound=0)

    assert [sample.mask.tolist() for sample in fresh] == [[1, 0, 1], [0, 0], [0, 1], [1, 1]]
    assert [sample.mask.tolist() for sample in samples] == [[0, 0, 0], [0, 0], [0, 0], [0, 1]]
    assert [sample.num_nonfinite for sample in fresh] == [0, 0, 1, 0]


def test_truncated_sampling_without_its_mask_is_counted() -> None:
    group = make_group([Row(token_ids=[4, 4])], top_p=0.8)

    assert [sample.num_unreplayed for sample in samples_of(group)] == [2]
    assert [sample.num_unreplayed for sample in samples_of(make_group([Row(token_ids=[4, 4])]))] == [0]


def test_greedy_and_evaluation_completions_are_never_trained_on() -> None:
    with pytest.raises(AssertionError, match="never trained on"):
        samples_of(make_group([Row(token_ids=[4])], is_evaluation=True))
    with pytest.raises(AssertionError, match="greedy"):
        samples_of(make_group([Row(token_ids=[4])], temperature=0.0))


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(MessageError, match="empty prompt"):
        samples_of(make_group([Row(token_ids=[4])], prompt=[]))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 200))
def test_split_covers_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    samples = samples_of(make_group([Row(token_ids=[4] * length, spans=((0, 0),)) for length in lengths]))

    parts = list(split(samples, budget))

    assert sorted(index for part in parts for index in part) == [i for i, length in enumerate(lengths) if length]
    for part in parts:
        padded = len(part) * max(samples[index].length for index in part)
        assert padded <= budget or len(part) == 1
    longest = [max(samples[index].length for index in part) for part in parts]
    assert longest == sorted(longest, reverse=True)
