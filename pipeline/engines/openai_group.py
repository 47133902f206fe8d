"""A group that servers are completing, as far as it has come.

In: a prompt, what another generator had of it, and the answers of servers as they come. Out: its
completions, or what there is of them. Only tokens whose weights are known count.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pipeline.engines.openai_answers import Answer, PassingError, WithdrawnError
from pipeline.engines.vllm_model import ServedModel
from pipeline.engines.vllm_outputs import Draft, Segment, all_of, drafts_of, left_of
from pipeline.engines.vllm_requests import completion_text, sampling_values, token_limit
from pipeline.errors import EngineError
from pipeline.messages import Completion, PartialGroup, PromptGroup

if TYPE_CHECKING:
    from pipeline.engines.openai_server import RemoteServer

_MAX_ATTEMPTS = 8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0


class Servers(Protocol):
    """Who may be asked."""

    is_interrupted: bool

    @property
    def is_open(self) -> bool:
        """Whether servers may be asked."""

    async def least_loaded(self, avoided: Collection[RemoteServer]) -> RemoteServer:
        """Waits for a server where there is none. Raises EngineError. avoided: asked only where there is no other."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A completion in flight. limit: tokens that it may have. answer: to its present request."""

    draft: Draft
    limit: int
    answer: Answer | None = None

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.limit - self.draft.num_tokens

    def take(self, segment: Segment) -> None:
        """Its request has ended with this."""
        self.draft.append(segment)
        self.answer = None

    def keep(self) -> None:
        """Its request has failed: what is known of the answer stays, and the next goes on from there."""
        self.draft, self.answer = self.so_far(), None

    def so_far(self) -> Draft:
        """With what its request has given until now, which leaves room for at least one more token."""
        return self.draft.with_(self.answer.so_far(self.room - 1)) if self.answer else self.draft


@dataclass(eq=False, slots=True)
class GroupInFlight:
    """sequences, tasks: of its completions that had not been finished elsewhere."""

    prompt: PromptGroup
    partial: PartialGroup | None
    model: ServedModel
    sequences: dict[int, Sequence]
    tasks: list[asyncio.Task[Completion | None]] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: PromptGroup, partial: PartialGroup | None, model: ServedModel) -> GroupInFlight:
        """One that nobody has been asked for yet. Raises EngineError: the context leaves no room."""
        limit = token_limit(prompt, model.context)
        drafts = drafts_of(prompt, partial, limit)
        sequences = {index: Sequence(draft=draft, limit=limit) for index, draft in drafts.items()}
        return cls(prompt=prompt, partial=partial, model=model, sequences=sequences)

    async def complete(self, index: int, servers: Servers) -> Completion | None:
        """One completion, at whichever server; it goes on from what one gave before it broke it off, or failed.

        Only what a server gave as its own answer counts as an attempt. None: it was interrupted. Raises EngineError.
        """
        sequence = self.sequences[index]
        failed_at: list[RemoteServer] = []
        while not servers.is_interrupted:
            server = await servers.least_loaded(failed_at)
            try:
                segment = await self._ask(server, index, sequence)
            except WithdrawnError:
                sequence.keep()
                continue
            except PassingError as error:
                sequence.keep()
                problem = str(error)
            else:
                sequence.take(segment)
                if segment.reason is not None:
                    token_ids = sequence.draft.token_ids
                    text = completion_text(self.model.tokenizer, token_ids, segment.stop_text)
                    return sequence.draft.completion(segment.reason, text)
                problem = f"{server.url} gave up a sequence"
            if not servers.is_interrupted:
                failed_at.append(server)
                await self._wait(len(failed_at), problem, is_last=not servers.is_open)
        return None

    async def _ask(self, server: RemoteServer, index: int, sequence: Sequence) -> Segment:
        prompt, draft = self.prompt, sequence.draft
        values = sampling_values(
            prompt, index, so_far=draft.num_tokens, max_tokens=sequence.room, end_ids=self.model.end_ids
        )
        sequence.answer = server.new_answer()
        return await server.complete([*prompt.prompt_token_ids.tolist(), *draft.token_ids], values, sequence.answer)

    async def _wait(self, num_failures: int, problem: str, *, is_last: bool) -> None:
        """Longer each time, and for each sequence another time. Raises EngineError after the last."""
        if num_failures >= _MAX_ATTEMPTS or is_last:
            attempts = f"attempt {num_failures} of {_MAX_ATTEMPTS}"
            raise EngineError(f"group {self.prompt.group_id}: {problem} ({attempts})")
        longest = min(_FIRST_WAIT_S * 2**num_failures, _LONGEST_WAIT_S)
        await asyncio.sleep(random.uniform(longest / 2, longest))

    def completions(self, ended: Iterable[object]) -> tuple[Completion, ...]:
        """All of them. ended: what became of each sequence. Raises Interrupted, and any error among these."""
        return all_of(self.prompt, self.partial, self._drafts(), ended)

    def left(self) -> PartialGroup:
        """What there is of it. Raises EngineError."""
        ended = [task.result() if task.done() and not task.cancelled() else None for task in self.tasks]
        return left_of(self.prompt, self.partial, self._drafts(), ended)

    def _drafts(self) -> dict[int, Draft]:
        return {index: sequence.so_far() for index, sequence in self.sequences.items()}
