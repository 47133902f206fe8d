"""The order of rows: whole epochs, and nothing but seed and position decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.prompts import CurriculumOrder, PromptOrder, PromptStatistics


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


def known(rewards: dict[int, float], num_rows: int = 8) -> PromptStatistics:
    statistics = PromptStatistics(num_rows)
    for row, reward in rewards.items():
        statistics.observe(row, reward, 0)
    return statistics


def curriculum(statistics: PromptStatistics, *, seed: int = 0, epochs: int = 0, floor: float = 0.05) -> CurriculumOrder:
    first = PromptOrder(len(statistics), seed=seed, epochs=epochs)
    return CurriculumOrder(first, statistics, seed=seed, epochs=epochs, floor=floor)


def test_a_curriculum_begins_with_every_row_once_in_the_order_without_it() -> None:
    order, plain = curriculum(known({0: 0.5})), PromptOrder(8, seed=0)
    assert [order.at(ordinal) for ordinal in range(8)] == [plain.at(ordinal) for ordinal in range(8)]


def test_behind_the_first_pass_rows_come_as_often_as_they_are_uncertain() -> None:
    order = curriculum(known({0: 0.0, 1: 1.0, 2: 0.5, 3: 0.25}, num_rows=5))
    rows = [place[1] for ordinal in range(5, 20_005) if (place := order.at(ordinal))]
    weights = [0.05, 0.05, 0.30, 0.2375, 0.05]  # the last was never seen with a reward
    for row, weight in enumerate(weights):
        assert rows.count(row) / 20_000 == pytest.approx(weight / sum(weights), abs=0.015)


@given(st.integers(0, 2**63), st.integers(8, 200))
def test_seed_position_and_what_is_known_decide_every_draw(seed: int, ordinal: int) -> None:
    statistics = known({0: 0.5, 3: 0.1, 7: 1.0})
    restored = PromptStatistics(8)
    restored.restore(statistics.encode())
    asked_before = curriculum(statistics, seed=seed)
    for earlier in (50, 9):
        asked_before.at(earlier)
    assert asked_before.at(ordinal) == curriculum(restored, seed=seed).at(ordinal)


def test_a_draw_goes_by_what_is_known_at_its_time() -> None:
    statistics = known({})
    order = curriculum(statistics, floor=1e-6)
    for row in range(8):
        statistics.observe(row, 1.0, 0)
    statistics.observe(5, 0.0, 1)
    assert {order.at(ordinal) for ordinal in range(8, 16)} == {(1, 5)}


def test_a_pass_of_a_curriculum_is_as_many_groups_as_there_are_rows() -> None:
    places = [curriculum(known({}), epochs=3).at(ordinal) for ordinal in range(25)]
    assert [place[0] for place in places if place] == [0] * 8 + [1] * 8 + [2] * 8
    assert places[24] is None


def test_the_draws_of_a_seed_never_change() -> None:
    order = curriculum(known({0: 0.5, 3: 0.1, 7: 1.0}))
    assert [place[1] for ordinal in range(8, 24) if (place := order.at(ordinal))] == GOLDEN_DRAWS


GOLDEN_DRAWS = [3, 7, 4, 2, 0, 3, 2, 0, 6, 0, 0, 2, 6, 0, 4, 7]
