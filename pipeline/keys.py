"""Every name that rollstream uses in Redis.

In: the name of a run. Out: the keys of that run. Nothing outside the run's prefix is ever
touched, and no other module spells a key. The braces make all keys of a run share one slot of a
Redis Cluster, which Lua scripts need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipeline.errors import ConfigError

CONSUMER_GROUP = "rollstream"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
META_OF_ALL_RUNS = "{*}:meta"


def run_of(key: str) -> str:
    """The run that a key belongs to."""
    return key[1:].partition("}")[0]


class Stream(StrEnum):
    """The queues that a group passes, in order of flow. Those of stages that a run does not have stay empty."""

    PROMPTS = "prompts"
    ROLLOUTS = "rollouts"
    TO_TEACH = "to_teach"
    TO_JUDGE = "to_judge"
    SCORED = "scored"


TAKEN_BY: Mapping[Stream, str] = {
    Stream.PROMPTS: "generator",
    Stream.ROLLOUTS: "scorer",
    Stream.TO_TEACH: "teacher",
    Stream.TO_JUDGE: "judge",
    Stream.SCORED: "trainer",
}
"""Stream -> role of the workers that claim from it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one run.

    run: name of the run, letters, digits, dot, dash and underscore.
    """

    run: str

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.run):
            raise ConfigError(
                f"run.name = {self.run!r}: use 1 to 100 letters, digits, '.', '-' or '_'; "
                "the first is a letter or digit"
            )

    def _key(self, name: str) -> str:
        return f"{{{self.run}}}:{name}"

    def stream(self, stream: Stream) -> str:
        """Stream of groups waiting for a stage."""
        return self._key(stream.value)

    @property
    def streams(self) -> tuple[str, ...]:
        """The queues in order of flow."""
        return tuple(self.stream(stream) for stream in Stream)

    @property
    def dead_letters(self) -> str:
        """Stream of groups that no one can process, with the reason."""
        return self._key("dead_letters")

    @property
    def ledger(self) -> str:
        """Hash of counters: fed, trained, dropped:<reason>, dead, and the evaluation ones."""
        return self._key("ledger")

    @property
    def uncommitted(self) -> str:
        """Hash group id -> prompt payload: trained into weights that no checkpoint holds yet."""
        return self._key("uncommitted")

    @property
    def evaluating(self) -> str:
        """Set of the ids of evaluation groups that are in the streams."""
        return self._key("evaluating")

    @property
    def partials(self) -> str:
        """Hash group id -> what a generator that had to leave has generated of it."""
        return self._key("partials")

    @property
    def replies(self) -> str:
        """Hash consumer -> its last call and what it was answered, for calls whose reply got lost."""
        return self._key("replies")

    @property
    def meta(self) -> str:
        """Hash: run id, resolved configuration, weight version, addresses of the weight publisher."""
        return self._key("meta")

    @property
    def control(self) -> str:
        """Hash of requests from people: paused, stop, drain:<role or worker>."""
        return self._key("control")

    @property
    def workers(self) -> str:
        """Hash worker id -> what it last said of itself (JSON)."""
        return self._key("workers")

    @property
    def crew(self) -> str:
        """Hash of the `up` that answers `rollstream scale`: holder, wanted:<role>, kept:<role>; expires."""
        return self._key("crew")

    @property
    def trainer_lock(self) -> str:
        """Held by the one trainer of the run; expires."""
        return self._key("trainer_lock")

    @property
    def device_turn(self) -> str:
        """Worker that may use the device of a colocated run; expires."""
        return self._key("device_turn")

    @property
    def device_wish(self) -> str:
        """How urgently another worker wants it; expires."""
        return self._key("device_wish")

    @property
    def types(self) -> Mapping[str, str]:
        """Key -> what Redis calls the type of what is in it."""
        hashes = (
            self.ledger,
            self.uncommitted,
            self.partials,
            self.replies,
            self.meta,
            self.control,
            self.workers,
            self.crew,
        )
        return {
            **dict.fromkeys((*self.streams, self.dead_letters), "stream"),
            **dict.fromkeys(hashes, "hash"),
            self.evaluating: "set",
            **dict.fromkeys((self.trainer_lock, self.device_turn, self.device_wish), "string"),
        }

    @property
    def pattern(self) -> str:
        """Glob that matches the run's keys and nothing else."""
        return self._key("*")
