"""The sum of what several functions say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.messages import Outcome, RewardResult
from pipeline.rewards.combining import combine

values = st.none() | st.floats(-1e6, 1e6)


def part(value: float | None) -> RewardResult:
    return RewardResult(name="f", value=value, outcome=Outcome.NONE if value is None else Outcome.OK)


@given(st.lists(st.tuples(values, st.floats(-10, 10)), min_size=1, max_size=5))
def test_functions_that_do_not_apply_change_nothing(terms: list[tuple[float | None, float]]) -> None:
    parts, weights = [part(value) for value, _ in terms], [weight for _, weight in terms]
    applying = [(value, weight) for value, weight in terms if value is not None]
    all_of_them = combine(parts, weights, "unscored")
    only_those = combine([part(value) for value, _ in applying], [weight for _, weight in applying], "unscored")
    assert all_of_them.reward == only_those.reward
    assert (all_of_them.reward is None) == (not applying)
    assert all_of_them.parts == tuple(parts)
