"""A teacher behind a server: what is asked, what is read, and what goes wrong."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.engines import openai_asker, openai_http
from pipeline.errors import ConfigError, ModelError, ScoringError, ServerAwayError, ServiceUnavailableError
from pipeline.judges import Judges
from pipeline.messages import Score, ScoredGroup
from pipeline.settings.problems import disagreements
from pipeline.streams import Lease
from pipeline.teachers import Teachers
from pipeline.wire import encode
from pipeline.worker.context import WorkerContext
from pipeline.worker.stage import HandBack
from tests.answering import Behave, answering
from tests.learning.builders import Row, make_group
from tests.tiny import VOCABULARY, make_tiny_model
from workers.teacher import TeachingWork

ROLLOUT = make_group([Row(token_ids=[7, 9]), Row(token_ids=[5])], prompt=[6, 8]).rollout
KEY = "not-to-be-told"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between attempts; an API key in the environment."""
    monkeypatch.setattr(openai_asker, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(openai_asker, "_LONGEST_WAIT_S", 0.002)
    monkeypatch.setenv("TEACHER_KEY", KEY)


def config_of(policy: Path, url: str, **teacher: object) -> Config:
    settings = {"url": url, "timeout_s": 20.0, "api_key_env": "TEACHER_KEY", **teacher}
    return Config.model_validate({"model": {"path": str(policy)}, "scoring": {"teachers": [settings]}})


def logprobs_of(body: dict[str, Any]) -> tuple[int, Any]:
    """-0.01 times each id of the prompt, as vLLM writes it, before the ids 50, 51 ... at -1, -2 ... if these are asked
    for; the first token has none."""
    more = {str(50 + rank): {"logprob": -1.0 - rank, "rank": rank + 1} for rank in range(body["prompt_logprobs"])}
    entries = [{str(token): {"logprob": -token / 100, "rank": 1}, **more} for token in body["prompt"][1:]]
    return 200, {"choices": [{"prompt_logprobs": [None, *entries]}]}


def honest(policy: Path) -> Behave:
    """With the policy's own tokenizer."""
    known = {letter: number for number, letter in enumerate(VOCABULARY, start=4)}

    def behave(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": [known.get(letter, 3) for letter in body["prompt"]]}
        return logprobs_of(body)

    return behave


async def test_the_prompt_is_sent_as_ids_and_the_completions_logprobs_are_read(policy: Path) -> None:
    with answering(honest(policy)) as server:
        teachers = Teachers(config_of(policy, server.url + "/v1/"))
        await teachers.start()
        said = await teachers.lessons(ROLLOUT)
        await teachers.close()
    assert said is not None
    assert said[0].top == ()
    np.testing.assert_allclose(said[0].logprobs, [-0.07, -0.09], rtol=1e-6)
    np.testing.assert_allclose(said[1].logprobs, [-0.05], rtol=1e-6)
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    assert sorted(body["prompt"] for body in asked) == [[6, 8, 5], [6, 8, 7, 9]]
    assert {body["model"] for body in asked} == {"tiny"}
    assert set(server.keys) == {f"Bearer {KEY}"}


async def test_the_likeliest_ids_are_asked_for_and_come_without_the_token_that_is_not_one(policy: Path) -> None:
    def three_or_two(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        status, answer = honest(policy)(path, body, number)
        if path == "/v1/completions":
            for entry in answer["choices"][0]["prompt_logprobs"][1:]:
                if "9" in entry:
                    entry["9"]["logprob"] = -9999.0
                if "5" in entry:
                    del entry["50"], entry["51"]
        return status, answer

    with answering(three_or_two) as server:
        teachers = Teachers(config := config_of(policy, server.url, top_k=2))
        await teachers.start()
        work = TeachingWork(cast(WorkerContext, SimpleNamespace(config=config)), teachers)
        (score,) = await work.scores_of(make_group([Row(token_ids=[7, 9])], prompt=[6, 8]))
        assert {body["prompt_logprobs"] for path, body in server.requests if path == "/v1/completions"} == {2}
        with pytest.raises(ScoringError, match="no logprob for every token of the prompt, or not those of its 2 like"):
            await teachers.lessons(ROLLOUT)
        await teachers.close()
    (top,) = score.teacher_top
    assert top.token_ids.tolist() == [[7, 50], [50, 51]]
    np.testing.assert_allclose(top.logprobs, [[-0.07, -1.0], [-1.0, -2.0]], rtol=1e-6)
    assert score.teacher_logprobs is not None
    assert score.teacher_logprobs[1] == -np.inf


async def test_a_server_that_tells_fewer_ids_is_refused_before_groups_come(policy: Path) -> None:
    def up_to_one(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        if path == "/v1/completions" and body["prompt_logprobs"] > 1:
            return 400, {"error": {"message": "2 logprobs are more than 1"}}
        return honest(policy)(path, body, number)

    with answering(up_to_one) as server:
        for top_k in (1, 2):
            teachers = Teachers(config_of(policy, server.url, top_k=top_k))
            refused = pytest.raises(
                ConfigError, match=r"teachers\[0\].top_k = 2: .*2 logprobs are more than 1; .*20 unless"
            )
            with refused if top_k == 2 else contextlib.nullcontext():
                await teachers.start()
            await teachers.close()


async def test_what_may_pass_is_asked_again_and_what_will_not_is_not(policy: Path) -> None:
    tried: Counter[str] = Counter()

    def moody(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        if path == "/tokenize":
            return 404, {"detail": "Not Found"}
        tried[str(body["prompt"])] += 1
        if body["prompt"][-1] == 5:
            return 400, {"error": {"message": "too long"}}
        return (503, {"error": "busy"}) if tried[str(body["prompt"])] < 3 else logprobs_of(body)

    with answering(moody) as server:
        teachers = Teachers(config_of(policy, server.url))
        await teachers.start()
        with pytest.raises(ScoringError, match="it refused with 400: too long"):
            await teachers.lessons(ROLLOUT)
        first = make_group([Row(token_ids=[7, 9])], prompt=[6, 8]).rollout
        tried.clear()
        assert await teachers.lessons(first) is not None
        await teachers.close()
    assert tried == {"[6, 8, 7, 9]": 3}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, {"choices": [{"text": "x"}]}), "gave no logprob for every token"),
        ((200, {"choices": [{"prompt_logprobs": [None, {"8": {"logprob": -1}}]}]}), "gave no logprob for every token"),
        ((429, {"error": {"message": "slow down"}}), "it answered 429: slow down"),
        (None, "no answer to /v1/completions in 0.2 s, 5 times"),
    ],
)
async def test_a_server_that_does_not_answer_as_it_should_fails_the_group(
    policy: Path, answer: tuple[int, Any] | None, said: str
) -> None:
    def behave(path: str, body: dict[str, Any], number: int) -> tuple[int, Any] | None:
        return (404, {}) if path == "/tokenize" else answer

    timeout = {"timeout_s": 0.2} if answer is None else {}
    with answering(behave) as server:
        teachers = Teachers(config_of(policy, server.url, **timeout))
        await teachers.start()
        with pytest.raises(ScoringError, match=said) as caught:
            await teachers.lessons(ROLLOUT)
        await teachers.close()
    assert KEY not in str(caught.value)


@contextmanager
def silence(port: int) -> Iterator[None]:
    """As of a machine that is off: whoever wants a connection hears nothing."""
    with socket.socket() as deaf, contextlib.ExitStack() as others:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deaf.bind(("127.0.0.1", port))
        deaf.listen(0)
        for _ in range(2):  # for whom there is room
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))
        yield


@pytest.mark.parametrize("place", [lambda port: contextlib.nullcontext(), silence], ids=["gone", "silent"])
async def test_groups_wait_for_a_server_that_has_gone_away(
    policy: Path, place: Callable[[int], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "_CONNECT_TIMEOUT_S", 0.2)
    with answering(lambda path, body, number: (404, {})) as server:
        config = config_of(policy, server.url)
        teachers = Teachers(config)
        await teachers.start()
        judges = Judges(Config.model_validate({"scoring": {"judges": [{"model": "tiny", "url": server.url}]}}))
        await judges.start()
    where = r"url = .*does not answer /v1/"
    work = TeachingWork(cast(WorkerContext, SimpleNamespace(config=config)), teachers)
    group = ScoredGroup(rollout=ROLLOUT, scores=tuple(Score(reward=1.0) for _ in ROLLOUT.completions), scorer="s")
    lease = cast(Lease, SimpleNamespace(payload=encode(group)))
    with place(int(server.server_address[1])):
        with pytest.raises(ServerAwayError, match=rf"scoring.judges\[0\].{where}"):
            await judges.judge(ROLLOUT, [Score(reward=1.0)] * len(ROLLOUT.completions))
        with pytest.raises(HandBack, match=rf"scoring.teachers\[0\].{where}"):
            await work.process(lease)
        assert "does not answer /v1/models" in await teachers.away()
    assert work.capacity() > 0
    await teachers.close()
    await judges.close()


async def test_another_vocabulary_at_the_server_is_refused(policy: Path) -> None:
    def foreign(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        return 200, {"tokens": [1, 2, 3]}

    with answering(foreign) as server:
        teachers = Teachers(config_of(policy, server.url))
        with pytest.raises(ModelError, match=r"scoring.teachers\[0\].url: the server's model has another vocabulary"):
            await teachers.start()
        await teachers.close()


async def test_a_wrong_key_model_or_address_ends_with_the_setting(policy: Path) -> None:
    def locked(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        return 401, {"error": {"message": "Unauthorized"}}

    with answering(locked) as server:
        teachers = Teachers(config_of(policy, server.url))
        with pytest.raises(ConfigError, match=r"set the variable that scoring.teachers\[0\].api_key_env names"):
            await teachers._teachers["default"]._asker.post("/v1/completions", {})  # type: ignore[attr-defined]
        await teachers.close()
        other = Teachers(config_of(policy, server.url, model="huge"))
        with pytest.raises(ConfigError, match=r"it does not serve scoring.teachers\[0\].model = 'huge'; it serves"):
            await other.start()
        await other.close()
        gone = server.url
    away = Teachers(config_of(policy, gone))
    with pytest.raises(ServiceUnavailableError, match=rf"scoring.teachers\[0\].url = '{gone}'.*does not answer"):
        await away.start()
    await away.close()
    for url in ("gpu1:8000", "http://user:secret@gpu1", "http://[oops"):
        with pytest.raises(ConfigError, match=r"scoring.teachers\[0\].url.*must look like") as caught:
            Teachers(config_of(policy, url))
        assert "secret" not in str(caught.value)


def test_a_run_that_samples_otherwise_than_servers_tell_is_refused_before_it_starts(policy: Path) -> None:
    config = config_of(policy, "http://gpu1:8000")
    assert disagreements(config) == []
    hot = config.model_copy(update={"generation": config.generation.model_copy(update={"temperature": 0.7})})
    (problem,) = disagreements(hot)
    assert problem.startswith("scoring.teachers[0].url with generation.temperature = 0.7")
