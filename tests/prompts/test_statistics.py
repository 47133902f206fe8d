"""What is known of each row: counts, means of the last groups, and how much of the data is solved."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.prompts import Coverage, PromptStatistics

observations = st.lists(
    st.tuples(st.integers(0, 9), st.floats(-2, 2, width=32), st.integers(0, 2**40)), min_size=1, max_size=40
)


def after(*seen: tuple[int, float, int], num_rows: int = 10, solved_reward: float = 1.0) -> PromptStatistics:
    statistics = PromptStatistics(num_rows, solved_reward=solved_reward)
    for row, reward, version in seen:
        statistics.observe(row, reward, version)
    return statistics


def test_a_row_has_its_count_the_mean_of_its_last_groups_and_the_version_that_wrote_the_last() -> None:
    statistics = after((3, 0.0, 1), (3, 1.0, 2), (3, 0.5, 7))
    assert statistics.of_row(3) == (3, 0.5, 7)
    assert statistics.of_row(4) == (0, 0.0, 0)


def test_a_row_that_the_data_does_not_have_is_passed_over() -> None:
    assert after((10, 1.0, 1), (-1, 1.0, 1)).coverage().seen == 0


def test_what_an_older_policy_could_do_is_forgotten() -> None:
    rewards = [0.0] * 100 + [1.0] * 16
    _, mean, _ = after(*((0, reward, 0) for reward in rewards)).of_row(0)
    assert mean == pytest.approx(1 - 0.75**16)


def test_success_rates_are_shares_of_the_reward_that_counts_as_solved() -> None:
    rates = after((0, 1.0, 0), (1, 4.0, 0), (2, -1.0, 0), num_rows=4, solved_reward=2.0).success_rates()
    assert rates[:3].tolist() == [0.5, 1.0, 0.0]
    assert math.isnan(rates[3])


def test_coverage_is_of_the_last_group_of_each_row() -> None:
    statistics = after((0, 0.0, 0), (0, 1.2, 1), (1, 1.2, 0), (1, 0.6, 1), (2, 0.0, 1), (3, -1.0, 1), solved_reward=1.2)
    assert statistics.coverage() == Coverage(in_data=10, seen=4, always_solved=1, sometimes_solved=1, never_solved=2)
    assert str(statistics.coverage()) == "4 of 10 seen (40%), solved: 25% always, 25% sometimes, 50% never"
    assert str(after().coverage()) == "0 of 10 seen (0%), solved: 0% always, 0% sometimes, 0% never"


def test_coverage_is_found_among_the_fields_of_a_record_and_not_where_one_is_missing() -> None:
    coverage = after((0, 0.5, 0)).coverage()
    fields: dict[str, object] = {"step": 3, **coverage.describe()}
    assert Coverage.of(fields) == coverage
    assert Coverage.of({**fields, "prompts_seen": None}) is None
    assert Coverage.of({"step": 3}) is None


@given(observations)
def test_what_was_written_comes_back_whole_and_goes_on_alike(seen: list[tuple[int, float, int]]) -> None:
    before, restored = after(*seen), PromptStatistics(10)
    restored.restore(before.encode())
    for statistics in (before, restored):
        statistics.observe(1, 0.25, 3)
    assert [restored.of_row(row) for row in range(10)] == [before.of_row(row) for row in range(10)]
    assert restored.coverage() == before.coverage()
    assert restored.encode() == before.encode()


def test_data_that_grew_keeps_what_is_known_and_data_that_shrank_leaves_the_rest_out() -> None:
    known = after((0, 1.0, 1), (9, 1.0, 1)).encode()
    grown, shrunk = PromptStatistics(20), PromptStatistics(5)
    grown.restore(known)
    shrunk.restore(known)
    assert (grown.coverage().seen, shrunk.coverage().seen) == (2, 1)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc1", after((0, 1.0, 1)).encode()[:-3]])
def test_what_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="statistics of prompts"):
        PromptStatistics(10).restore(data)


def test_rows_that_were_not_seen_take_no_room() -> None:
    assert len(after((0, 1.0, 1), num_rows=1_000_000).encode()) < 100
