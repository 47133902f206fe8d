"""A judge behind a server: a language model that is asked for a score.

In: rollouts. Out: a reward from 0 to 1 for each completion. Equal questions are asked once; answers that
are no score, and servers that do not answer, are errors of that completion and of no other.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from pipeline.config import JudgeSettings
from pipeline.engines.openai_asker import Asker, NoAnswerInTimeError
from pipeline.engines.together import together
from pipeline.errors import ScoringError, ServerAwayError
from pipeline.judges import text_of
from pipeline.judges.answers import score_in
from pipeline.judges.cache import ScoreCache, key_of
from pipeline.judges.question import Question
from pipeline.messages import Json, Outcome, RewardResult, RolloutGroup
from pipeline.rewards.failure_log import FailureLog

_MAX_PROBLEM_CHARS = 400
_MAX_SHOWN = 120
_log = structlog.get_logger()


class ChatJudge:
    """A `Judge` behind a URL. setting: how its settings are called."""

    def __init__(self, settings: JudgeSettings, setting: str) -> None:
        self.name = settings.title
        self.num_asked = 0
        self._settings = settings
        self._setting = setting
        self._asker = Asker(settings, setting)
        self._question = Question(
            settings.prompt,
            setting=f"{setting}.prompt",
            min_score=settings.min_score,
            max_score=settings.max_score,
        )
        self._cache = ScoreCache(settings.cache, setting=f"{setting}.cache")
        self._asking: dict[str, asyncio.Task[float]] = {}
        self._failures = FailureLog()

    async def start(self) -> None:
        """Raises ConfigError, ServiceUnavailableError."""
        await self._asker.start()

    async def away(self) -> str:
        """See `Judge`."""
        return await self._asker.away()

    async def rewards(self, rollout: RolloutGroup) -> list[RewardResult]:
        """See `Judge`."""
        prompt, columns = text_of(rollout.prompt.prompt), rollout.prompt.columns
        questions = [self._question.about(prompt, item.text, columns) for item in rollout.completions]
        return await together(map(self._reward, questions))

    async def close(self) -> None:
        """Break off what is under way."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._asker.close()
        self._cache.close()

    async def _reward(self, question: str) -> RewardResult:
        self._failures.count_call(self.name)
        try:
            score = await self._score(question)
        except ServerAwayError:
            raise
        except NoAnswerInTimeError as error:
            return self._failed(Outcome.TIMEOUT, str(error))
        except ScoringError as error:
            return self._failed(Outcome.ERROR, str(error))
        low, high = self._settings.min_score, self._settings.max_score
        return RewardResult(name=self.name, value=(score - low) / (high - low), outcome=Outcome.OK)

    async def _score(self, question: str) -> float:
        request: dict[str, Json] = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
        }
        # A score means something between its bounds alone, which a template of one's own need not name.
        bounds = [self._settings.min_score, self._settings.max_score]
        key = key_of([self._settings.url, self._asker.model, request, *bounds])
        if (known := self._cache.get(key)) is not None:
            return known
        if key not in self._asking:
            self._asking[key] = task = asyncio.create_task(self._ask(key, request))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(self._asking[key])

    def _forget(self, key: str, done: asyncio.Task[float]) -> None:
        """Whoever waited for it may have gone, and asyncio complains of errors that nobody has looked at."""
        self._asking.pop(key, None)
        if not done.cancelled():
            done.exception()

    async def _ask(self, key: str, request: dict[str, Json]) -> float:
        self.num_asked += 1
        answer: Any = await self._asker.post("/v1/chat/completions", request)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError) as error:
            raise ScoringError(f"the judge's server gave no message ({error!r})") from error
        if not isinstance(text, str | None):
            raise ScoringError(f"the judge's server gave a message that is no text: {str(text)[:_MAX_SHOWN]}")
        score = score_in(text or "")
        low, high = self._settings.min_score, self._settings.max_score
        if not low <= score <= high:
            raise ScoringError(f"the judge's score {score:g} is not between {low:g} and {high:g}")
        self._cache.put(key, score)
        return score

    def _failed(self, outcome: Outcome, problem: str) -> RewardResult:
        self._failures.add(self.name, outcome, problem)
        return RewardResult(name=self.name, value=None, outcome=outcome, problem=problem[:_MAX_PROBLEM_CHARS])
