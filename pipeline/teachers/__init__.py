"""Teachers: models whose logprobs the policy is to come near.

In: rollouts. Out: for each completion the logprob of every token, [T], at the temperature it was drawn with,
and where that is asked for those of the likeliest ids. A teacher is a model in this process or behind a
server; it is never trained and never samples.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pipeline.config import Config, TeacherSettings
from pipeline.engines.together import together
from pipeline.errors import MessageError
from pipeline.messages import Floats, RolloutGroup, TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """What is said of a completion. logprobs: [T], -inf where a token has no chance. top: of each teacher that
    is asked for more."""

    logprobs: Floats
    top: tuple[TopLogprobs, ...] = ()


class Teacher(Protocol):
    """One teacher."""

    async def start(self) -> None:
        """Load the model, or reach the server. Raises UsageError, ServiceUnavailableError."""

    async def away(self) -> str:
        """Why its server cannot be reached; empty where it can, or there is none."""

    def lessons(self, rollout: RolloutGroup) -> Coroutine[Any, Any, list[Lesson]]:
        """On each completion. Raises MessageError, ScoringError."""

    async def close(self) -> None:
        """Let everything go. Safe to call twice."""


class Teachers:
    """The teachers of a run, each row taught by its own or by all.

    Where several teach a row, their logprobs are averaged by weight: the policy's divergence from that
    average is the weighted mean of its divergences from each. Their likeliest ids stay apart, each with its weight.
    """

    def __init__(self, config: Config) -> None:
        scoring = config.scoring
        self._column = scoring.teacher_column
        self._settings = {settings.title: settings for settings in scoring.teachers}
        self._teachers = {
            settings.title: _make(config, settings, f"scoring.teachers[{index}]")
            for index, settings in enumerate(scoring.teachers)
        }

    async def start(self) -> None:
        """All of them. Raises UsageError, ServiceUnavailableError."""
        for teacher in self._teachers.values():
            await teacher.start()

    async def away(self) -> str:
        """Why servers cannot be reached; empty where all can."""
        return "; ".join(filter(None, [await teacher.away() for teacher in self._teachers.values()]))

    async def close(self) -> None:
        """All of them. Safe to call twice."""
        for teacher in self._teachers.values():
            await teacher.close()

    def names_for(self, rollout: RolloutGroup) -> list[str]:
        """Who teaches this row; nobody where its column is empty. Raises MessageError for a stranger."""
        if not self._column:
            return list(self._teachers)
        name = rollout.prompt.columns.get(self._column)
        if name is None or name == "":
            return []
        if not isinstance(name, str) or name not in self._teachers:
            raise MessageError(
                f"column {self._column!r} (scoring.teacher_column) names the teacher {name!r}; there are: "
                f"{', '.join(self._teachers)}"
            )
        return [name]

    async def lessons(self, rollout: RolloutGroup) -> list[Lesson] | None:
        """On each completion; None where nobody teaches the row. Raises MessageError, ScoringError."""
        names = self.names_for(rollout)
        if not names:
            return None
        said = await together(self._teachers[name].lessons(rollout) for name in names)
        weights = [self._settings[name].weight for name in names]
        logprobs = average([[lesson.logprobs for lesson in lessons] for lessons in said], weights)
        top = [
            tuple(
                replace(item, weight=weight) for one, weight in zip(lessons, weights, strict=True) for item in one.top
            )
            for lessons in zip(*said, strict=True)
        ]
        return [Lesson(logprobs=values, top=items) for values, items in zip(logprobs, top, strict=True)]


def average(said: Sequence[Sequence[Floats]], weights: Sequence[float]) -> list[Floats]:
    """sum_k w_k log p_k / sum_k w_k at each token. said: of each teacher, for each completion [T]."""
    shares = np.array(weights, dtype=np.float64) / sum(weights)
    return [
        np.tensordot(shares, np.stack(rows).astype(np.float64), 1).astype(np.float32)
        for rows in zip(*said, strict=True)
    ]


def _make(config: Config, settings: TeacherSettings, setting: str) -> Teacher:
    if settings.url:
        from pipeline.teachers.remote import RemoteTeacher

        return RemoteTeacher(config, settings, setting)
    from pipeline.teachers.local import LocalTeacher

    return LocalTeacher(config, settings, setting)
