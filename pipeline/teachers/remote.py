"""A teacher behind a vLLM server: logprobs of a prompt, which has the completion at its end.

In: rollouts, as token ids. Out: logprobs of their tokens, and of the likeliest ids. Such servers tell them
at temperature 1 and over the whole vocabulary, and so only a run that samples like this can have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.config import Config, TeacherSettings
from pipeline.engines.openai_asker import Asker, RefusedError
from pipeline.engines.together import together
from pipeline.errors import ConfigError, ScoringError, ServiceUnavailableError
from pipeline.messages import RolloutGroup, TopLogprobs
from pipeline.teachers import Lesson
from pipeline.teachers.vocabulary import check_remote

_NO_LOGPROB = -9999.0  # what the server writes for minus infinity


class RemoteTeacher:
    """A `Teacher` behind a URL."""

    def __init__(self, config: Config, settings: TeacherSettings, setting: str) -> None:
        self._config = config
        self._settings = settings
        self._setting = setting
        self._asker = Asker(settings, setting)

    async def start(self) -> None:
        """Raises ConfigError, ModelError, ServiceUnavailableError."""
        await self._asker.start()
        await check_remote(self._asker, self._config.model, setting=self._setting)
        if self._settings.top_k:
            await self._check_top_k()

    async def away(self) -> str:
        """See `Teacher`."""
        return await self._asker.away()

    async def lessons(self, rollout: RolloutGroup) -> list[Lesson]:
        """See `Teacher`. One request for each completion."""
        prompt = rollout.prompt.prompt_token_ids.tolist()
        return await together(self._of(prompt, item.token_ids.tolist()) for item in rollout.completions)

    async def close(self) -> None:
        """Break off what is under way."""
        await self._asker.close()

    async def _check_top_k(self) -> None:
        try:
            await self._of([0], [0])
        except RefusedError as error:
            raise ConfigError(
                f"{self._setting}.top_k = {self._settings.top_k}: {error}; a vLLM server tells at most 20 unless it is "
                "started with --max-logprobs: lower top_k, or start it with more"
            ) from error
        except ScoringError as error:
            raise ServiceUnavailableError(str(error)) from error

    async def _of(self, prompt: list[int], completion: list[int]) -> Lesson:
        # The one token that it has to draw costs one step; 0 asks for the logprobs of the prompt's own tokens alone.
        top_k = self._settings.top_k
        body = {"prompt": [*prompt, *completion], "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
        answer = await self._asker.post("/v1/completions", body)
        try:
            found = answer["choices"][0]["prompt_logprobs"][len(prompt) : len(prompt) + len(completion)]
            logprobs = np.array(
                [_logprob(entry[str(token)]) for entry, token in zip(found, completion, strict=True)], dtype=np.float32
            )
            return Lesson(logprobs=logprobs, top=(_top_of(found, top_k),) if top_k else ())
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(
                f"{self._setting}: the server gave no logprob for every token of the prompt"
                f"{f', or not those of its {top_k} likeliest ids' if top_k else ''} ({error!r}); a vLLM server does"
            ) from error


def _top_of(found: Sequence[Mapping[str, Any]], top_k: int) -> TopLogprobs:
    """The prompt's own token comes with them, and need not be one."""
    rows = [
        sorted(((_logprob(said), int(token)) for token, said in entry.items()), reverse=True)[:top_k] for entry in found
    ]
    values = np.array(rows, dtype=np.float64).reshape(len(found), top_k, 2)
    return TopLogprobs(token_ids=values[..., 1].astype(np.uint32), logprobs=values[..., 0].astype(np.float32))


def _logprob(said: Mapping[str, Any]) -> float:
    value = float(said["logprob"])
    return float("-inf") if value <= _NO_LOGPROB else value
