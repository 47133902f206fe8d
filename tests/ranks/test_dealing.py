"""Micro-batches for several ranks: each sample once, as many for each rank, about as many tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batching import Layout, Sample, make_samples
from pipeline.config import StalenessSettings
from pipeline.ranks.dealing import deal, shortest
from pipeline.staleness import assess
from tests.learning.builders import Row, make_group


def samples_of(lengths: list[int]) -> list[Sample]:
    group = make_group([Row(token_ids=[4] * length, reward=1.0) for length in lengths])
    return make_samples([group], [assess(group, 0, StalenessSettings())])


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    budget=st.integers(1, 200),
    size=st.integers(1, 5),
    layout=st.sampled_from(Layout),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_is_computed_once_and_every_rank_waits_equally_often(
    lengths: list[int], budget: int, size: int, layout: Layout
) -> None:
    samples = samples_of(lengths)
    deals = [deal(samples, budget, layout, rank=rank, size=size) for rank in range(size)]
    dealt = [index for each in deals for rows in each.micro_batches for index in rows]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len({len(each.micro_batches) for each in deals}) == 1
    assert sorted(index for rows in deals[0].of_all_ranks for index in rows) == sorted(dealt)
    for rows in (rows for each in deals for rows in each.micro_batches if len(rows) > 1 and layout is Layout.PADDED):
        assert len(rows) * max(samples[index].length for index in rows) <= budget


def test_one_micro_batch_is_cut_for_two_ranks() -> None:
    samples = samples_of([10] * 8)
    deals = [deal(samples, 10**6, Layout.PADDED, rank=rank, size=2) for rank in range(2)]
    assert [[len(rows) for rows in each.micro_batches] for each in deals] == [[4], [4]]
    assert deals[0].balance == 1


def test_tokens_are_balanced_where_lengths_are_uneven() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 64).tolist()
    assert deal(samples_of(lengths), 1000, Layout.PADDED, rank=0, size=4).balance > 0.85


def test_a_rank_that_has_nothing_to_do_gets_an_empty_micro_batch() -> None:
    samples = samples_of([5])
    assert [deal(samples, 100, Layout.PADDED, rank=rank, size=3).micro_batches for rank in range(3)] == [
        [[0]],
        [[]],
        [[]],
    ]
    assert shortest(samples_of([9, 3, 5])) == 1


@pytest.mark.parametrize("size", [1, 4])
def test_nothing_to_train_on_is_no_micro_batch_for_anyone(size: int) -> None:
    group = make_group([Row(token_ids=[4], reward=None)])
    samples = make_samples([group], [assess(group, 0, StalenessSettings())])
    assert deal(samples, 100, Layout.PADDED, rank=0, size=size).micro_batches == []
