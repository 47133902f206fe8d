"""Scoring: values, failures of every kind, and capacity that comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.errors import RewardLoadError, RollstreamError
from pipeline.messages import Outcome
from tests.rewards.pools import reward, rewards_of, rollout, running_pool, until_busy


async def test_every_completion_gets_its_reward_in_order() -> None:
    async with running_pool(reward("num_letters")) as pool:
        assert await rewards_of(pool, rollout("a", "bbb", "cc")) == [1.0, 3.0, 2.0]


async def test_async_functions_are_awaited() -> None:
    async with running_pool(reward("concurrently")) as pool:
        assert await rewards_of(pool, rollout("a", "bbb")) == [1.0, 3.0]
        assert await rewards_of(pool, rollout("cc", "d")) == [2.0, 1.0]


async def test_the_reward_is_the_weighted_sum_of_the_functions_that_apply() -> None:
    rewards = [reward("num_letters", weight=2.0), reward("even_only", weight=10.0)]
    async with running_pool(*rewards) as pool:
        scores = await pool.score(rollout("a", "bb"))
    assert [score.reward for score in scores] == [2.0, 24.0]
    assert [part.outcome for part in scores[0].parts] == [Outcome.OK, Outcome.NONE]
    assert [(part.name, part.value) for part in scores[1].parts] == [("num_letters", 2.0), ("even_only", 2.0)]


async def test_a_completion_to_which_nothing_applies_has_no_reward() -> None:
    async with running_pool(reward("never_applies")) as pool:
        assert await rewards_of(pool, rollout("a", "b")) == [None, None]


async def test_truth_values_are_numbers() -> None:
    async with running_pool(reward("is_right")) as pool:
        assert await rewards_of(pool, rollout("yes", "no", columns={"answer": "yes"})) == [1.0, 0.0]


async def test_kwargs_of_the_settings_reach_the_function_by_name() -> None:
    async with running_pool(reward("scaled", kwargs={"factor": 0.5})) as pool:
        assert await rewards_of(pool, rollout("a", "b")) == [0.5, 0.5]


async def test_kwargs_of_the_settings_go_before_a_column_of_the_same_name() -> None:
    async with running_pool(reward("scaled", kwargs={"factor": 0.5})) as pool:
        assert await rewards_of(pool, rollout("a", columns={"factor": 9.0})) == [0.5]


async def test_a_function_sees_what_trl_would_pass_for_text() -> None:
    expected = {
        "prompts": ["2+2=", "2+2="],
        "completions": ["4", "5"],
        "completion_ids": [[0, 1, 2], [0, 1, 2]],
        "columns": {"answer": [4, 4], "prompt_id": ["x", "x"]},
    }
    columns = {"seen": expected, "answer": 4, "prompt_id": "x", "completions": "a column that is in the way"}
    async with running_pool(reward("sees")) as pool:
        group = rollout("4", "5", prompt="2+2=", columns=columns, num_tokens=3)
        assert await rewards_of(pool, group) == [1.0, 1.0]


async def test_a_function_sees_messages_where_the_prompt_is_a_chat() -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    expected = {
        "prompts": [prompt],
        "completions": [[{"role": "assistant", "content": "4"}]],
        "completion_ids": [[0]],
        "columns": {},
    }
    async with running_pool(reward("sees")) as pool:
        assert await rewards_of(pool, rollout("4", prompt=prompt, columns={"seen": expected}, num_tokens=1)) == [1.0]


async def test_a_function_that_changes_one_prompt_does_not_change_the_others() -> None:
    prompt = [{"role": "user", "content": "hi"}]
    async with running_pool(reward("spoils_its_arguments")) as pool:
        for _ in range(2):
            assert await rewards_of(pool, rollout("a", "b", prompt=prompt, columns={"tags": ["t"]})) == [4.0, 4.0]


async def test_exception_timeout_none_and_zero_are_told_apart_and_counted_apart() -> None:
    functions = ["raises", "hangs", "never_applies", "zero"]
    rewards = [reward(function, timeout_s=0.2 if function == "hangs" else 30) for function in functions]
    async with running_pool(*rewards, num_processes=2) as pool:
        (score,) = await pool.score(rollout("a"))
        outcomes = {part.name: (part.outcome, part.value) for part in score.parts}
    assert outcomes == {
        "raises": (Outcome.ERROR, None),
        "hangs": (Outcome.TIMEOUT, None),
        "never_applies": (Outcome.NONE, None),
        "zero": (Outcome.OK, 0.0),
    }
    assert (pool.stats["raises"].errors, pool.stats["raises"].timeouts) == (1, 0)
    assert (pool.stats["hangs"].errors, pool.stats["hangs"].timeouts) == (0, 1)
    assert pool.stats["never_applies"].outcomes == {Outcome.NONE: 1}
    assert (pool.stats["zero"].num_zeros, pool.stats["zero"].outcomes) == (1, {Outcome.OK: 1})


@pytest.mark.parametrize(("on_failure", "expected"), [("unscored", [None, None]), ("zero", [0.0, 0.0])])
async def test_a_failed_function_leaves_the_completion_unscored_or_at_zero(
    on_failure: str, expected: list[float | None]
) -> None:
    rewards = [reward("num_letters"), reward("raises")]
    async with running_pool(*rewards, on_failure=on_failure) as pool:  # type: ignore[arg-type]
        assert await rewards_of(pool, rollout("a", "bb")) == expected


async def test_a_function_that_raises_once_scores_the_next_group() -> None:
    async with running_pool(reward("raises_for_b")) as pool:
        assert await rewards_of(pool, rollout("b")) == [None]
        assert await rewards_of(pool, rollout("a")) == [1.0]


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("too_many", "returned 3 values for 2 completions"),
        ("number", "returned float; expected a list, with"),
        ("nothing", "returned NoneType; expected a list, with a number or None for each of the 2 completions"),
        ("dict", "returned dict; expected a list, with"),
    ],
)
async def test_a_return_of_the_wrong_shape_is_an_error_for_the_whole_group(what: str, problem: str) -> None:
    with capture_logs() as logs:
        async with running_pool(reward("returns_what_is_asked")) as pool:
            scores = await pool.score(rollout("a", "b", columns={"what": what}))
    assert [score.parts[0].outcome for score in scores] == [Outcome.ERROR, Outcome.ERROR]
    assert problem in logs[0]["problem"]


async def test_a_function_that_never_returned_what_a_reward_returns_is_refused() -> None:
    async with running_pool(reward("returns_what_is_asked")) as pool:
        wrong = rollout("a", "b", columns={"what": "too_many"})
        for _ in range(2):
            await pool.score(wrong)
        with pytest.raises(RewardLoadError, match=r"scoring\.rewards: returns_what_is_asked returned 3 values for 2"):
            await pool.score(wrong)


async def test_one_value_is_no_sign_of_use_where_there_is_one_completion() -> None:
    async with running_pool(reward("returns_what_is_asked")) as pool:
        for _ in range(3):
            await pool.score(rollout("a", columns={"what": "nan"}))
        for _ in range(2):
            await pool.score(rollout("a", "b", columns={"what": "too_many"}))
        with pytest.raises(RewardLoadError, match="returned 3 values for 2"):
            await pool.score(rollout("a", "b", columns={"what": "too_many"}))


async def test_a_function_whose_column_is_never_there_is_refused() -> None:
    async with running_pool(reward("is_right")) as pool:
        for _ in range(2):
            await pool.score(rollout("a"))
        with pytest.raises(RewardLoadError, match="is_right needs the data column 'answer'; the data set has: none"):
            await pool.score(rollout("a"))


async def test_a_function_that_was_right_once_is_never_refused() -> None:
    async with running_pool(reward("returns_what_is_asked")) as pool:
        await pool.score(rollout("a", "b", columns={"what": "nan"}))
        for _ in range(4):
            scores = await pool.score(rollout("a", "b", columns={"what": "too_many"}))
            assert [score.parts[0].outcome for score in scores] == [Outcome.ERROR, Outcome.ERROR]


@pytest.mark.parametrize("what", ["nan", "inf", "huge", "text"])
async def test_a_value_that_is_no_finite_number_is_an_error_for_that_completion(what: str) -> None:
    async with running_pool(reward("returns_what_is_asked")) as pool:
        scores = await pool.score(rollout("a", "b", columns={"what": what}))
    assert [score.parts[0].outcome for score in scores] == [Outcome.OK, Outcome.ERROR]
    assert [score.reward for score in scores] == [1.0, None]


async def test_a_function_that_always_fails_is_logged_every_ten_seconds_with_the_number_of_failures() -> None:
    seconds = iter((0.0, 1.0, 9.9, 10.0, 15.0, 20.1))
    with capture_logs() as logs:
        async with running_pool(reward("raises"), clock=lambda: next(seconds)) as pool:
            for _ in range(6):
                await pool.score(rollout("a"))
    assert [entry["event"] for entry in logs] == ["reward_failed"] * 3
    assert [entry["num_failures"] for entry in logs] == [1, 3, 2]
    assert [entry["num_calls"] for entry in logs] == [1, 3, 2]
    for entry in logs:
        assert entry["function"] == "raises"
        assert "KeyError: 'no such thing'" in entry["problem"]
        assert "samples.py:" in entry["problem"]
    assert ["traceback" in entry for entry in logs] == [True, False, False]
    assert logs[0]["traceback"].count("File ") == 1, "the user's code, and not what called it"
    assert pool.stats["raises"].errors == 6


async def test_a_function_that_fails_at_times_is_logged_with_how_often_it_was_called() -> None:
    seconds = iter((0.0, 10.0, 20.0))
    with capture_logs() as logs:
        async with running_pool(reward("raises_for_b"), clock=lambda: next(seconds)) as pool:
            for text in "baaabaab":
                await pool.score(rollout(text))
    assert [(entry["num_failures"], entry["num_calls"]) for entry in logs] == [(1, 1), (1, 4), (1, 3)]


async def test_two_functions_that_fail_are_both_logged() -> None:
    with capture_logs() as logs:
        async with running_pool(reward("raises"), reward("exits"), clock=lambda: 0.0) as pool:
            for _ in range(2):
                await pool.score(rollout("a"))
    assert sorted(entry["function"] for entry in logs) == ["exits", "raises"]


async def test_a_failure_within_a_library_names_the_line_of_the_user() -> None:
    with capture_logs() as logs:
        async with running_pool(reward("fails_in_a_library")) as pool:
            await pool.score(rollout("no json"))
    assert "JSONDecodeError" in logs[0]["problem"]
    assert "samples.py:" in logs[0]["problem"]


async def test_a_missing_column_is_named() -> None:
    with capture_logs() as logs:
        async with running_pool(reward("is_right")) as pool:
            await pool.score(rollout("a", columns={"anser": "a"}))
    assert logs[0]["problem"] == "needs the data column 'answer'; the data set has: anser"


@pytest.mark.parametrize("function", ["hangs", "hangs_in_c"])
async def test_a_call_that_hangs_is_ended_at_its_timeout(function: str) -> None:
    async with running_pool(reward(function, timeout_s=0.2)) as pool:
        (score,) = await pool.score(rollout("a"))
        assert score.parts[0].outcome is Outcome.TIMEOUT


async def test_hangs_in_turn_do_not_use_up_capacity() -> None:
    async with running_pool(reward("hangs_on_long", timeout_s=1.0), num_processes=2) as pool:
        for _ in range(3):
            hanging = [pool.score(rollout("a very long completion")) for _ in range(2)]
            await asyncio.gather(*hanging)
        assert await rewards_of(pool, rollout("short")) == [1.0]
        assert pool.stats["hangs_on_long"].timeouts == 6
        assert len(pool.pids) == 2


async def test_other_groups_flow_while_one_hangs() -> None:
    async with running_pool(reward("hangs_on_long", timeout_s=30), num_processes=2) as pool:
        hanging = asyncio.create_task(pool.score(rollout("a very long completion")))
        for _ in range(3):
            assert await rewards_of(pool, rollout("short")) == [1.0]
        assert not hanging.done()
        hanging.cancel()


@pytest.mark.parametrize(("function", "problem"), [("dies", "exited with code 7"), ("is_killed", "killed by SIGKILL")])
async def test_a_process_that_dies_is_an_error_and_is_replaced(function: str, problem: str) -> None:
    with capture_logs() as logs:
        async with running_pool(reward(function), reward("num_letters")) as pool:
            for _ in range(2):
                (score,) = await pool.score(rollout("abc"))
                assert [part.outcome for part in score.parts] == [Outcome.ERROR, Outcome.OK]
    assert problem in logs[0]["problem"]


async def test_a_function_that_calls_exit_is_an_error() -> None:
    async with running_pool(reward("exits")) as pool:
        (score,) = await pool.score(rollout("a"))
        assert score.parts[0].outcome is Outcome.ERROR


async def test_what_a_function_prints_does_not_disturb_its_answer() -> None:
    async with running_pool(reward("prints")) as pool:
        assert await rewards_of(pool, rollout("a", "b")) == [1.0, 1.0]


async def test_as_many_calls_run_at_once_as_there_are_processes(tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path), "num_others": 3}
    async with running_pool(reward("waits_for_others", kwargs=kwargs), num_processes=4) as pool:
        scored = await asyncio.gather(*(rewards_of(pool, rollout("a")) for _ in range(4)))
    assert scored == [[1.0]] * 4


async def test_a_cancelled_call_does_not_answer_for_the_next() -> None:
    async with running_pool(reward("hangs_on_long"), reward("num_letters")) as pool:
        call = asyncio.create_task(pool.score(rollout("a very long completion")))
        await until_busy(pool)
        call.cancel()
        await asyncio.wait([call])
        assert await rewards_of(pool, rollout("abc")) == [4.0]


@pytest.mark.parametrize("ending", ["returns", "exits", "raises"])
async def test_a_forked_copy_that_comes_back_does_not_answer(ending: str) -> None:
    async with running_pool(reward("forks", kwargs={"ending": ending})) as pool:
        pids = pool.pids
        for text in ("a", "bb", "ccc"):
            assert await rewards_of(pool, rollout(text)) == [float(len(text))]
        assert pool.pids == pids


async def test_a_second_answer_ends_the_process_and_is_never_taken_for_that_of_the_next_call() -> None:
    with capture_logs() as logs:
        async with running_pool(reward("answers_twice")) as pool:
            assert await rewards_of(pool, rollout("first")) == [-1.0]
            assert await rewards_of(pool, rollout("second")) == [None]
            assert await rewards_of(pool, rollout("three")) == [5.0]
    assert [entry["event"] for entry in logs] == ["reward_failed"]
    assert "it answered call 2 when it was asked call 3" in logs[0]["problem"]


async def test_closing_ends_calls_in_flight_and_all_processes() -> None:
    async with running_pool(reward("hangs"), num_processes=2) as pool:
        calls = [asyncio.create_task(pool.score(rollout("a"))) for _ in range(5)]  # three of them wait
        await until_busy(pool)
        await pool.close()
        for call in [*calls, asyncio.create_task(pool.score(rollout("a")))]:
            with pytest.raises(RollstreamError, match="closed"):
                await call
        assert pool.pids == []
