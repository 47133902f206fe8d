"""Judges: models that reward completions.

In: rollouts. Out: for each completion what each judge says of it, beside what reward functions said. A
judge is a sequence classifier in this process or a language model behind a server. One that fails is
told apart from one that says 0, as with reward functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipeline.config import Config, JudgeSettings
from pipeline.engines.together import together
from pipeline.judges.adding import with_judgements
from pipeline.messages import Prompt, RewardResult, RolloutGroup, Score


class Judge(Protocol):
    """One judge. name: in metrics and records."""

    name: str

    async def start(self) -> None:
        """Load the model, or reach the server. Raises UsageError, ServiceUnavailableError."""

    async def away(self) -> str:
        """Why its server cannot be reached; empty where it can, or there is none."""

    async def rewards(self, rollout: RolloutGroup) -> list[RewardResult]:
        """What it says of each completion. Raises MessageError, ConfigError, ServerAwayError."""

    async def close(self) -> None:
        """Let everything go. Safe to call twice."""


class Judges:
    """The judges of a run. on_call: is told by name how many seconds a judge took for a group."""

    def __init__(self, config: Config, *, on_call: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        scoring = config.scoring
        self._weights = [settings.weight for settings in scoring.judges]
        self._on_failure = scoring.on_failure
        self._on_call = on_call
        self._judges = [
            _make(config, settings, f"scoring.judges[{index}]") for index, settings in enumerate(scoring.judges)
        ]

    async def start(self) -> None:
        """All of them. Raises UsageError, ServiceUnavailableError."""
        for judge in self._judges:
            await judge.start()

    async def away(self) -> str:
        """Why servers cannot be reached; empty where all can."""
        return "; ".join(filter(None, [await judge.away() for judge in self._judges]))

    async def close(self) -> None:
        """All of them. Safe to call twice."""
        for judge in self._judges:
            await judge.close()

    async def judge(self, rollout: RolloutGroup, scores: Sequence[Score]) -> tuple[Score, ...]:
        """The scores with what the judges say. Raises MessageError, ConfigError."""
        said = await together(self._ask(judge, rollout) for judge in self._judges)
        by_completion = zip(*said, strict=True)
        return tuple(
            with_judgements(score, parts, self._weights, self._on_failure)
            for score, parts in zip(scores, by_completion, strict=True)
        )

    async def _ask(self, judge: Judge, rollout: RolloutGroup) -> list[RewardResult]:
        started = time.monotonic()
        try:
            return await judge.rewards(rollout)
        finally:
            self._on_call(judge.name, time.monotonic() - started)


def text_of(prompt: Prompt) -> str:
    """A prompt as text; of a conversation each message behind the role that says it."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def _make(config: Config, settings: JudgeSettings, setting: str) -> Judge:
    if settings.url:
        from pipeline.judges.chat import ChatJudge

        return ChatJudge(settings, setting)
    from pipeline.judges.classifier import Classifier

    return Classifier(config, settings, setting)
