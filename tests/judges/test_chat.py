"""A language model as a judge: what it is asked, what is read out of its answer, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Config
from pipeline.engines import openai_asker
from pipeline.errors import ConfigError, MessageError, ScoringError, ServiceUnavailableError
from pipeline.judges import Judges, text_of
from pipeline.judges.answers import score_in
from pipeline.judges.chat import ChatJudge
from pipeline.messages import Json, Outcome, RewardResult, RolloutGroup, Score
from tests.answering import Answering, Behave, answering, says
from tests.learning.builders import Row, make_group

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between attempts."""
    monkeypatch.setattr(openai_asker, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(openai_asker, "_LONGEST_WAIT_S", 0.002)


def rollout_of(*texts: str, **columns: Json) -> RolloutGroup:
    rollout = make_group([Row(token_ids=[4]) for _ in texts]).rollout
    completions = tuple(replace(item, text=text) for item, text in zip(rollout.completions, texts, strict=True))
    return replace(rollout, prompt=replace(rollout.prompt, prompt="2+2?", columns=columns), completions=completions)


def config_of(url: str, *, on_failure: str = "unscored", **judge: object) -> Config:
    settings = {"name": "fair", "model": "tiny", "url": url, "timeout_s": 20.0, **judge}
    return Config.model_validate({"scoring": {"judges": [settings], "on_failure": on_failure}})


def judge_of(server: Answering, **settings: object) -> ChatJudge:
    config = config_of(server.url, **settings)
    return ChatJudge(config.scoring.judges[0], "scoring.judges[0]")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"score": 7}', 7.0),
        ('First {"score": 2}, on reflection:\n```json\n{"why": "x", "score": 7.5}\n```', 7.5),
        ("I give it 8 of 10, so: 8", 8.0),
        ("Score: -1.5", -1.5),
        ("Score: 7/10", 7.0),
        ("1 of 3 steps is wrong, so it gets 6.5 out of 10.", 6.5),
        ('{"score": %s}, or 4' % ("9" * 400), 4.0),
        ('{"score": %s} 3' % ("[" * 100_000), 3.0),
        ('{"score": "6"}', 6.0),
        ('{"verdict": "good"} 9', 9.0),
    ],
)
def test_the_score_is_the_last_object_that_has_one_or_the_last_number(answer: str, score: float) -> None:
    assert score_in(answer) == score


@pytest.mark.parametrize("answer", ["", "good", "9" * 400, '{"score": null}', '{"score": true}', "v1.2.3 gpt4x"])
def test_an_answer_without_a_score_is_an_error(answer: str) -> None:
    with pytest.raises(ScoringError, match="the judge gave no score"):
        score_in(answer)


@given(st.text(max_size=60))
def test_any_answer_is_a_finite_number_or_an_error(answer: str) -> None:
    with contextlib.suppress(ScoringError):
        assert abs(score_in(answer)) < float("inf")


async def test_equal_questions_are_asked_once_and_scores_become_rewards_from_0_to_1(tmp_path: Path) -> None:
    def behave(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        assert (path, body["model"], body["temperature"]) == ("/v1/chat/completions", "tiny", 0)
        return says('{"score": 5}' if "four" in body["messages"][0]["content"] else "1")

    with answering(behave) as server:
        cache = str(tmp_path / "deep" / "scores.sqlite")
        for num_asked in (2, 0):  # the second judge finds what the first has left in the file
            judge = judge_of(server, cache=cache, min_score=1, max_score=5)
            await judge.start()
            found = await judge.rewards(rollout_of("four", "five", "four"))
            assert [item.value for item in found] == [1.0, 0.0, 1.0]
            assert {item.outcome for item in found} == {Outcome.OK}
            assert judge.num_asked == num_asked
            await judge.close()
    question = server.requests[0][1]["messages"][0]["content"]
    assert "2+2?" in question
    assert "from 1 (useless) to 5" in question


async def test_a_template_of_ones_own_has_the_columns_and_misses_what_is_not_there(tmp_path: Path) -> None:
    template = tmp_path / "question.jinja"
    template.write_text("{{ completion }} against {{ answer }}{{ ''.__class__ if unsafe is defined }}")
    with answering(lambda path, body, number: says("10")) as server:
        judge = judge_of(server, prompt=str(template))
        await judge.rewards(rollout_of("4", answer="four"))
        assert server.requests[0][1]["messages"][0]["content"] == "4 against four"
        with pytest.raises(
            MessageError, match=r"scoring.judges\[0\].prompt.*'answer' is undefined; there are: completion"
        ):
            await judge.rewards(rollout_of("4"))
        with pytest.raises(MessageError, match="unsafe"):
            await judge.rewards(rollout_of("4", answer="four", unsafe=True))
        for wrong in ("{{ 1 / 0 }}", "{{ prompt + 1 }}", "{% include 'x' %}", "{{ '{}'.format() }}"):
            template.write_text(wrong)
            with pytest.raises(MessageError, match=r"scoring.judges\[0\].prompt: the template cannot be filled in"):
                judge_of(server, prompt=str(template))._question.about("2+2?", "4", {})
        template.write_text("{% if %}")
        with pytest.raises(ConfigError, match=r"scoring.judges\[0\].prompt = .* is no Jinja template"):
            judge_of(server, prompt=str(template))
        with pytest.raises(ConfigError, match=r"scoring.judges\[0\].prompt = .* cannot be read"):
            judge_of(server, prompt=str(tmp_path / "none"))
        with pytest.raises(ConfigError, match=r"scoring.judges\[0\].prompt = .* cannot be read"):
            judge_of(server, prompt="~nobody-of-this-name/question")
        other = tmp_path / "other.sqlite"
        with contextlib.closing(sqlite3.connect(other)) as database:
            database.execute("CREATE TABLE scores (what TEXT)")
        for cache in (template / "x", template, other, "~nobody-of-this-name/x"):
            with pytest.raises(ConfigError, match=r"scoring.judges\[0\].cache = .* cannot be used"):
                judge_of(server, cache=str(cache))
        await judge.close()


async def test_a_cache_gives_no_score_of_other_bounds_and_one_that_breaks_ends_no_judge(tmp_path: Path) -> None:
    template, cache = tmp_path / "question.jinja", tmp_path / "scores.sqlite"
    template.write_text("{{ completion }}")
    with answering(lambda path, body, number: says("4")) as server:
        for most, reward in ((8, 0.5), (4, 1.0)):
            judge = judge_of(server, cache=str(cache), prompt=str(template), max_score=most)
            assert [item.value for item in await judge.rewards(rollout_of("4"))] == [reward]
            await judge.close()
        judge = judge_of(server, cache=str(cache), prompt=str(template), max_score=4)
        with contextlib.closing(sqlite3.connect(cache)) as database:
            database.execute("DROP TABLE scores")
        for _ in range(2):
            assert [item.value for item in await judge.rewards(rollout_of("5"))] == [1.0]
        assert judge.num_asked == 1, "what it knows stays in memory"
        await judge.close()


FAILURES: dict[str, tuple[Behave, Outcome, str]] = {
    "no score": (lambda path, body, number: says("well"), Outcome.ERROR, "the judge gave no score: 'well'"),
    "out of bounds": (lambda path, body, number: says("11"), Outcome.ERROR, "score 11 is not between 0 and 10"),
    "no text": (
        lambda path, body, number: (200, {"choices": [{"message": {"content": [{"text": "5"}]}}]}),
        Outcome.ERROR,
        "gave a message that is no text",
    ),
    "no message": (lambda path, body, number: (200, {"choices": []}), Outcome.ERROR, "gave no message"),
    "always busy": (lambda path, body, number: (503, {"error": "busy"}), Outcome.ERROR, "it answered 503: busy"),
    "refused": (lambda path, body, number: (400, {"error": "too long"}), Outcome.ERROR, "refused with 400: too long"),
    "silent": (lambda path, body, number: None, Outcome.TIMEOUT, "no answer to /v1/chat/completions in 0.2 s, 5 times"),
}


@pytest.mark.parametrize("kind", sorted(FAILURES))
async def test_a_failure_is_that_of_its_completion_and_not_a_zero(kind: str) -> None:
    behave, outcome, problem = FAILURES[kind]

    def of_one(path: str, body: dict[str, Any], number: int) -> tuple[int, Any] | None:
        return behave(path, body, number) if "bad" in body["messages"][0]["content"] else says("10")

    with answering(of_one) as server:
        timeout = {"timeout_s": 0.2} if kind == "silent" else {}
        for on_failure, reward in (("unscored", None), ("zero", 0.0)):
            judges = Judges(config_of(server.url, on_failure=on_failure, weight=2.0, **timeout))
            await judges.start()
            scored = Score(reward=0.5, parts=(RewardResult(name="rule", value=0.5, outcome=Outcome.OK),))
            good, bad = await judges.judge(rollout_of("good", "bad"), (scored, scored))
            assert good.reward == 2.5
            assert [part.name for part in good.parts] == ["rule", "fair"]
            assert bad.reward == reward
            assert bad.parts[1].outcome is outcome
            assert problem in bad.parts[1].problem
            await judges.close()


async def test_what_rules_left_unscored_stays_so_and_what_does_not_apply_is_judged_alone() -> None:
    with answering(lambda path, body, number: says("5")) as server:
        judges = Judges(config_of(server.url))
        failed = Score(reward=None, parts=(RewardResult(name="rule", value=None, outcome=Outcome.TIMEOUT),))
        absent = Score(reward=None, parts=(RewardResult(name="rule", value=None, outcome=Outcome.NONE),))
        scores = await judges.judge(rollout_of("a", "b"), (failed, absent))
        assert [score.reward for score in scores] == [None, 0.5]
        await judges.close()


async def test_no_more_requests_are_under_way_than_the_settings_allow() -> None:
    now, most, are_three = [], [], threading.Event()

    def slow(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        now.append(number)
        most.append(len(now))
        if len(now) == 3:
            are_three.set()
        are_three.wait(60)  # the first wait for as many as may be under way, however slowly they come
        server.is_over.wait(0.02)
        now.remove(number)
        return says("5")

    with answering(slow) as server:
        judge = judge_of(server, max_concurrency=3, timeout_s=120.0)
        await asyncio.gather(*(judge.rewards(rollout_of(*(f"{row}-{n}" for n in range(8)))) for row in range(2)))
        await judge.close()
    assert max(most) == 3


async def test_a_wrong_key_or_address_ends_with_the_setting_and_tells_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-to-be-told")
    for status, said in ((401, "wants another API key"), (404, "should name an OpenAI-compatible server")):
        with answering(lambda path, body, number, status=status: (status, {}), models=()) as server:
            judge = judge_of(server)
            await judge.start()  # such a server need not list its models
            with pytest.raises(ConfigError, match=rf"scoring.judges\[0\].url = '{server.url}': it .*{said}") as caught:
                await judge.rewards(rollout_of("4"))
            assert "not-to-be-told" not in str(caught.value)
            assert server.keys == ["Bearer not-to-be-told"]
            await judge.close()
    nobody = judge_of(server)
    with pytest.raises(ServiceUnavailableError, match=r"scoring.judges\[0\].url.*does not answer /v1/models"):
        await nobody.start()
    await nobody.close()


async def test_a_key_with_its_files_newline_is_one_and_with_other_control_characters_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answering(lambda path, body, number: says("5")) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "not-to-be-told\n")
        judge = judge_of(server)
        await judge.rewards(rollout_of("4"))
        assert server.keys == ["Bearer not-to-be-told"]
        await judge.close()
        monkeypatch.setenv("OPENAI_API_KEY", "not-to-\nbe-told")
        with pytest.raises(ConfigError, match=r"scoring.judges\[0\].api_key_env names holds") as caught:
            judge_of(server)
        assert "be-told" not in str(caught.value)


def test_a_judge_behind_a_server_needs_no_torch() -> None:
    code = (
        "import sys, workers.judge, pipeline.judges.chat; from pipeline.config import Config; "
        "from pipeline.judges import Judges; judge = {'url': 'http://a:1'}; "
        "Judges(Config.model_validate({'scoring': {'judges': [judge]}})); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_conversation_is_told_with_who_said_what() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert text_of(messages) == "system: Be brief.\n\nuser: 2+2?"
