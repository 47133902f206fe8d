"""Groups in feeding order: their ids, what is skipped, and that a cursor restores everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import EvaluationSettings
from pipeline.errors import DataError
from pipeline.messages import PromptGroup
from pipeline.prompts import Dataset, Encode, PromptOrder, PromptSource, Row, evaluation_groups
from pipeline.wire import decode, encode
from tests.prompts.rows import SAMPLING, dataset, letters, source

MIXED = ["a", "much too long", "b", "c", "also too long", "d"]


def identity(group: PromptGroup | None) -> tuple[str, int, int, int] | None:
    return (group.group_id, group.ordinal, group.epoch, group.dataset_index) if group else None


def test_the_same_text_twice_makes_two_groups() -> None:
    prompts = source(["same", "same"], epochs=1)
    groups = [prompts.next_group(0, 0), prompts.next_group(0, 0)]
    assert {group.group_id for group in groups if group} == {"00000000", "00000001"}
    assert prompts.next_group(0, 0) is None


def test_prompts_that_are_too_long_are_skipped_and_counted() -> None:
    prompts = source(MIXED, max_prompt_tokens=5, epochs=2)
    groups = list(iter(lambda: prompts.next_group(0, 0), None))
    assert sorted(str(group.prompt) for group in groups) == sorted("abcd" * 2)
    assert prompts.num_skipped == 4
    assert prompts.cursor == 12


@given(st.integers(0, 30))
def test_a_cursor_restores_order_and_ids_whatever_was_skipped_before(num_taken: int) -> None:
    first, resumed = source(MIXED, max_prompt_tokens=5), source(MIXED, max_prompt_tokens=5)
    for _ in range(num_taken):
        first.next_group(0, 0)
    resumed.cursor = first.cursor
    assert [identity(first.next_group(0, 0)) for _ in range(12)] == [
        identity(resumed.next_group(0, 0)) for _ in range(12)
    ]


def test_ids_are_positions_and_count_what_is_skipped() -> None:
    prompts = source(MIXED, max_prompt_tokens=5, shuffle=False)
    groups = [prompts.next_group(0, 0) for _ in range(5)]
    assert [group.group_id for group in groups if group] == ["00000000", "00000002", "00000003", "00000005", "00000006"]
    assert [group.epoch for group in groups if group] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("epochs", [0, 1])
def test_data_without_one_prompt_that_fits_ends_with_a_message(epochs: int) -> None:
    prompts = source(["too long", "longer still"], max_prompt_tokens=5, epochs=epochs)
    with pytest.raises(DataError, match=r"words: every prompt is longer than 5 tokens.*max_prompt_tokens"):
        prompts.next_group(0, 0)


def test_a_run_resumed_behind_its_last_usable_row_comes_to_its_end() -> None:
    prompts = source(["a", "too long"], max_prompt_tokens=5, shuffle=False, epochs=1)
    prompts.cursor = 1
    assert prompts.next_group(0, 0) is None


def test_a_group_carries_all_that_later_stages_need() -> None:
    rows = Dataset("sums", [Row(number=1, prompt="1+1=", columns={"answer": 2, "tags": ["easy"]})])
    prompts = PromptSource(
        rows,
        PromptOrder(1, seed=0),
        encode=letters,
        sampling=SAMPLING,
        max_prompt_tokens=9,
        clock=lambda: 12.5,
    )
    group = prompts.next_group(7, 5)
    assert group is not None
    arrived = decode(encode(group), PromptGroup)
    assert arrived.prompt_token_ids.tolist() == letters("1+1=")
    assert arrived.columns == {"answer": 2, "tags": ["easy"]}
    assert (arrived.fed_version, arrived.min_version, arrived.hops) == (7, 5, {"fed": 12.5})
    assert arrived.sampling == SAMPLING
    assert not arrived.is_evaluation


def test_a_prompt_without_tokens_names_its_row() -> None:
    nothing: Encode = lambda _: []  # noqa: E731
    prompts = PromptSource(
        dataset(["?"]), PromptOrder(1, seed=0), encode=nothing, sampling=SAMPLING, max_prompt_tokens=9
    )
    with pytest.raises(DataError, match="words, row 1: the prompt has no tokens"):
        prompts.next_group(0, 0)


def test_prompts_are_tokenised_once_over_all_epochs() -> None:
    calls: list[object] = []

    def counting(prompt: object) -> list[int]:
        calls.append(prompt)
        return [1]

    prompts = PromptSource(
        dataset(["a", "b"]), PromptOrder(2, seed=0), encode=counting, sampling=SAMPLING, max_prompt_tokens=9
    )
    for _ in range(8):
        prompts.next_group(0, 0)
    assert sorted(map(str, calls)) == ["a", "b"]


def test_evaluation_groups_are_marked_and_named_after_their_version() -> None:
    settings = EvaluationSettings(num_prompts=5, group_size=2, temperature=0.0)
    groups = evaluation_groups(dataset(MIXED), letters, settings, 40, sampling=SAMPLING, max_prompt_tokens=5)
    assert [group.group_id for group in groups] == ["eval-40-0", "eval-40-2", "eval-40-3"]
    assert all(group.is_evaluation and group.min_version == group.fed_version == 40 for group in groups)
    assert {(group.sampling.group_size, group.sampling.temperature) for group in groups} == {(2, 0.0)}
    assert decode(encode(groups[0]), PromptGroup).group_id == "eval-40-0"


def test_evaluation_without_one_prompt_that_fits_is_an_error() -> None:
    with pytest.raises(DataError, match="every prompt is longer than 2 tokens"):
        evaluation_groups(dataset(["long"]), letters, EvaluationSettings(), 0, sampling=SAMPLING, max_prompt_tokens=2)
