"""Ages of tokens at the boundary, over several versions, and what each policy does (S3, S5)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from pipeline.config import StalenessSettings
from pipeline.errors import MessageError
from pipeline.messages import ScoredGroup
from pipeline.staleness import assess
from pipeline.wire import decode, encode
from tests.learning.builders import Row, make_group

Policy = Literal["correct", "mask", "drop"]


def settings(max_staleness: int, policy: Policy = "correct") -> StalenessSettings:
    return StalenessSettings(max_staleness=max_staleness, policy=policy)


def group_over_versions(*spans: tuple[int, int], length: int = 6) -> ScoredGroup:
    return make_group([Row(token_ids=[4] * length, spans=spans)])


@pytest.mark.parametrize("bound", [0, 1, 8])
@pytest.mark.parametrize("policy", ["correct", "mask", "drop"])
def test_token_at_the_bound_is_within_it_and_one_version_more_is_over(bound: int, policy: Policy) -> None:
    group = group_over_versions((3, 0))

    within = assess(group, 3 + bound, settings(bound, policy))
    over = assess(group, 3 + bound + 1, settings(bound, policy))

    assert (within.keep, within.num_over, within.max_age) == (True, 0, bound)
    assert within.masks[0].all()
    assert (over.num_over, over.max_age) == (6, bound + 1)
    assert over.keep == (policy != "drop")
    assert over.masks[0].all() == (policy == "correct")
    assert (over.num_corrected, over.num_masked) == ((6, 0) if policy == "correct" else (0, 6))


def test_sequence_over_three_versions_is_masked_token_by_token() -> None:
    group = group_over_versions((1, 0), (2, 2), (4, 5))

    assessment = assess(group, 4, settings(2, "mask"))

    np.testing.assert_array_equal(assessment.token_ages[0], [3, 3, 2, 2, 2, 0])
    np.testing.assert_array_equal(assessment.masks[0], [0, 0, 1, 1, 1, 1])
    assert (assessment.keep, assessment.num_over, assessment.num_masked, assessment.num_corrected) == (True, 2, 2, 0)
    assert assessment.mean_age == pytest.approx(12 / 6)


def test_spans_survive_the_wire() -> None:
    group = group_over_versions((1, 0), (2, 2), (4, 5))

    arrived = decode(encode(group), ScoredGroup)

    before, after = assess(group, 5, settings(2)), assess(arrived, 5, settings(2))
    np.testing.assert_array_equal(before.token_ages[0], after.token_ages[0])


def test_one_old_token_drops_its_whole_group() -> None:
    rows = [Row(token_ids=[4, 4], spans=((5, 0),)), Row(token_ids=[4, 4, 4], spans=((1, 0), (5, 1)))]

    assessment = assess(make_group(rows), 5, settings(2, "drop"))

    assert not assessment.keep
    assert not any(mask.any() for mask in assessment.masks)
    assert assessment.num_over == 1


def test_tokens_that_the_policy_did_not_write_have_no_say() -> None:
    row = Row(token_ids=[4, 4, 4], spans=((1, 0), (5, 1)), loss_mask=[0, 1, 1])

    assessment = assess(make_group([row]), 5, settings(2, "drop"))

    assert assessment.keep
    assert (assessment.num_tokens, assessment.max_age) == (2, 0)
    np.testing.assert_array_equal(assessment.masks[0], [0, 1, 1])


def test_token_from_the_future_is_an_error() -> None:
    with pytest.raises(MessageError, match=r"weight version 4, but the trainer is at 3"):
        assess(group_over_versions((3, 0), (4, 2)), 3, settings(2))


def test_group_without_tokens_has_age_zero() -> None:
    assessment = assess(make_group([Row(token_ids=[], spans=())]), 3, settings(0, "drop"))

    assert (assessment.keep, assessment.num_tokens, assessment.max_age, assessment.mean_age) == (True, 0, 0, 0.0)
