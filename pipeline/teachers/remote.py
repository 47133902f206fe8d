"""A teacher behind a vLLM server: logprobs of a prompt, which has the completion at its end.

In: rollouts, as token ids. Out: logprobs of their tokens. Such servers tell them at temperature 1 and
over the whole vocabulary, and so only a run that samples like this can have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.config import Config, TeacherSettings
from pipeline.engines.openai_asker import Asker
from pipeline.engines.together import together
from pipeline.errors import ScoringError
from pipeline.messages import Floats, RolloutGroup
from pipeline.teachers.vocabulary import check_remote

_NO_LOGPROB = -9999.0  # what the server writes for minus infinity


class RemoteTeacher:
    """A `Teacher` behind a URL."""

    def __init__(self, config: Config, settings: TeacherSettings, setting: str) -> None:
        self._config = config
        self._setting = setting
        self._asker = Asker(settings, setting)

    async def start(self) -> None:
        """Raises ConfigError, ModelError, ServiceUnavailableError."""
        await self._asker.start()
        await check_remote(self._asker, self._config.model, setting=self._setting)

    async def away(self) -> str:
        """See `Teacher`."""
        return await self._asker.away()

    async def logprobs(self, rollout: RolloutGroup) -> list[Floats]:
        """See `Teacher`. One request for each completion."""
        prompt = rollout.prompt.prompt_token_ids.tolist()
        return await together(self._of(prompt, item.token_ids.tolist()) for item in rollout.completions)

    async def close(self) -> None:
        """Break off what is under way."""
        await self._asker.close()

    async def _of(self, prompt: list[int], completion: list[int]) -> Floats:
        # The one token that it has to draw costs one step; 0 asks for the logprobs of the prompt's own tokens alone.
        body = {"prompt": [*prompt, *completion], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await self._asker.post("/v1/completions", body)
        try:
            found = answer["choices"][0]["prompt_logprobs"]
            return np.array(
                [_logprob(found[len(prompt) + index], token) for index, token in enumerate(completion)],
                dtype=np.float32,
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ScoringError(
                f"{self._setting}: the server gave no logprob for every token of the prompt ({error!r}); "
                "a vLLM server does"
            ) from error


def _logprob(entry: Mapping[str, Any], token: int) -> float:
    value = float(entry[str(token)]["logprob"])
    return float("-inf") if value <= _NO_LOGPROB else value
