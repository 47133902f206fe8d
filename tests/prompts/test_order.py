"""The order of rows: whole epochs, and nothing but seed and position decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.prompts import PromptOrder


@given(st.integers(1, 40), st.integers(0, 2**63), st.integers(0, 5), st.booleans())
def test_every_epoch_holds_every_row_once(num_rows: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = PromptOrder(num_rows, seed=seed, shuffle=shuffle)
    places = [order.at(ordinal) for ordinal in range(epoch * num_rows, (epoch + 1) * num_rows)]
    assert sorted(index for place in places if place for index in [place[1]]) == list(range(num_rows))
    assert {place[0] for place in places if place} == {epoch}


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_positions_asked_for_in_any_order_give_the_same_rows(ordinals: list[int]) -> None:
    asked_at_random = PromptOrder(17, seed=5)
    in_sequence = PromptOrder(17, seed=5)
    expected = [in_sequence.at(ordinal) for ordinal in range(501)]
    assert [asked_at_random.at(ordinal) for ordinal in ordinals] == [expected[ordinal] for ordinal in ordinals]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch_of(seed: int, epoch: int) -> list[int]:
        order = PromptOrder(50, seed=seed)
        return [place[1] for ordinal in range(50) if (place := order.at(epoch * 50 + ordinal))]

    orders = [epoch_of(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_of_a_seed_never_changes() -> None:
    order = PromptOrder(8, seed=0)
    assert [order.at(ordinal) for ordinal in range(8)] == [(0, index) for index in GOLDEN]


def test_without_shuffling_rows_come_as_they_lie() -> None:
    order = PromptOrder(3, seed=0, shuffle=False, epochs=2)
    assert [order.at(ordinal) for ordinal in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), None]


# Written down so that a run can be resumed by a later version of rollstream or numpy.
GOLDEN = [0, 3, 7, 5, 1, 2, 6, 4]
