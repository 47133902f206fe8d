"""Errors of reward functions that cannot be told as they are cost no process."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from pipeline.messages import Outcome
from tests.rewards.pools import reward, rollout, running_pool


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("surrogate", r"ValueError: half of a pair: \ud800 ("),
        ("value", r"returned _Odd for a completion: half of a pair: \ud800"),
        ("mute", "MuteError: (its message cannot be made: RuntimeError) ("),
        ("endless", "ValueError: xxx"),
        ("cancelled", "CancelledError: for reasons of its own ("),
        ("interrupt", "KeyboardInterrupt:  ("),
    ],
)
async def test_an_error_that_cannot_be_told_as_it_is_is_an_answer_all_the_same(what: str, problem: str) -> None:
    with capture_logs() as logs:
        async with running_pool(reward("raises_oddly"), reward("process_id")) as pool:
            scores = [(await pool.score(rollout("a", columns={"what": what})))[0] for _ in range(2)]
    assert [score.parts[0].outcome for score in scores] == [Outcome.ERROR] * 2
    assert scores[0].parts[0].problem.startswith(problem)
    assert scores[0].parts[1].value == scores[1].parts[1].value, "the process has lived on"
    assert [entry["event"] for entry in logs] == ["reward_failed"]
    assert len(logs[0]["problem"]) < 5000
