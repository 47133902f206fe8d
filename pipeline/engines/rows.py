"""What is known of every sequence being decoded, one a row, in arrays over all rows.

In: sequences that join, and the tokens of each step. Out: completions, and which rows moved when
others left. Rows in use are always the first ones; no step runs Python code for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pipeline.engines.kv_cache import Prefix, power_of_two
from pipeline.engines.sampling import RowSampling, uniforms
from pipeline.messages import (
    Completion,
    ExpertIds,
    FinishReason,
    PartialGroup,
    PromptGroup,
    RoutedExperts,
    SamplingMask,
    UnfinishedCompletion,
    VersionSpan,
)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

# length: tokens whose keys are in the cache. next_id: token that the next step reads.
_ROW = np.dtype(
    [
        ("length", "i8"),
        ("next_id", "i8"),
        ("num_tokens", "i8"),
        ("limit", "i8"),
        ("temperature", "f4"),
        ("is_greedy", "?"),
        ("top_p", "f4"),
        ("top_k", "i8"),
        ("has_stop", "?"),
        ("keeps_mask", "?"),
        ("keeps_routing", "?"),
    ],
    align=True,
)
_TOKEN = np.dtype([("id", "u4"), ("logprob", "f4"), ("version", "i8"), ("uniform", "f8")])
_NO_LIMIT = 1 << 40


@dataclass(slots=True, kw_only=True, eq=False)
class GroupTask:
    """A prompt group on its way through the decoder.

    limit: tokens of one completion. partial: what another engine had of it. waiting: completions that
    have not been given a row. prefix: keys and values of all prompt tokens but the last, while there are such.
    routed: experts of these tokens, [P - 1, layers, top_k], where they are recorded.
    """

    prompt: PromptGroup
    limit: int
    partial: PartialGroup | None = None
    prefix: Prefix | None = None
    routed: ExpertIds | None = None
    completions: dict[int, Completion] = field(default_factory=dict)
    waiting: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.partial is not None:
            self.completions.update(self.partial.finished)
        self.waiting = [index for index in range(self.size) if index not in self.completions]

    @property
    def size(self) -> int:
        """Completions asked for."""
        return self.prompt.sampling.group_size

    def begun(self, index: int) -> UnfinishedCompletion | None:
        """What another engine had of a completion. The experts that read it are not carried along."""
        if self.partial is None or self.prompt.sampling.keep_routed_experts:
            return None
        found = self.partial.unfinished.get(index)
        return found if found is not None and len(found) < self.limit else None

    def left(self, drawn: Mapping[int, UnfinishedCompletion]) -> PartialGroup:
        """All there is. drawn: of the completions that have a row."""
        begun = {index: found for index in self.waiting if (found := self.begun(index)) is not None}
        unfinished = {} if self.prompt.sampling.keep_routed_experts else {**begun, **drawn}
        return PartialGroup(prompt=self.prompt, finished=dict(self.completions), unfinished=unfinished)


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    task: GroupTask
    index: int
    kept_ids: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    routed: list[ExpertIds] = field(default_factory=list)


class Rows:
    """The arrays. `num_rows` are in use. num_experts: of each layer, where they are recorded."""

    def __init__(self, max_rows: int, *, num_experts: int = 0) -> None:
        self.num_rows = 0
        self._num_experts = num_experts
        self._rows = np.zeros(max_rows, dtype=_ROW)
        self._tokens = np.zeros((max_rows, 0), dtype=_TOKEN)
        self._members: list[_Member] = []
        self._range = np.arange(max_rows)

    @property
    def active(self) -> npt.NDArray[np.void]:
        """The rows in use, as a view."""
        return self._rows[: self.num_rows]

    @property
    def num_columns(self) -> int:
        """Tokens that the next step has to read in the longest row."""
        return int(self.active["length"].max()) + 1

    def add(self, task: GroupTask, index: int, vocabulary_size: int) -> None:
        """Completion `index` of `task` takes the first free row, with the tokens that it has already."""
        sampling, ids = task.prompt.sampling, task.prompt.prompt_token_ids
        is_greedy = sampling.temperature == 0
        top_k = sampling.top_k if sampling.is_truncated and sampling.top_k else vocabulary_size
        # Rounding must not cut a tail that nobody asked to cut, so "all of the mass" is out of reach.
        top_p = sampling.top_p if sampling.is_truncated and sampling.top_p < 1 else 2.0
        row = self.num_rows
        self._rows[row] = (
            len(ids) - 1,
            ids[-1],
            0,
            task.limit,
            1.0 if is_greedy else sampling.temperature,
            is_greedy,
            top_p,
            top_k,
            bool(sampling.stop),
            sampling.keep_sampling_mask and sampling.is_truncated,
            sampling.keep_routed_experts,
        )
        if task.limit > self._tokens.shape[1]:
            grown = np.zeros((len(self._rows), power_of_two(task.limit)), dtype=_TOKEN)
            grown[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = grown
        self._tokens["uniform"][row, : task.limit] = uniforms(sampling.seed, task.prompt.ordinal, index, task.limit)
        prompt_experts = [] if task.routed is None else [task.routed]
        self._members.append(_Member(task=task, index=index, routed=prompt_experts))
        self.num_rows += 1
        if (begun := task.begun(index)) is not None:
            self._go_on(row, begun)

    def _go_on(self, row: int, begun: UnfinishedCompletion) -> None:
        num_tokens = len(begun)
        tokens = self._tokens[row, :num_tokens]
        tokens["id"], tokens["logprob"] = begun.token_ids, begun.generator_logprobs
        tokens["version"] = begun.token_versions
        self._rows["length"][row] += num_tokens
        self._rows["next_id"][row] = begun.token_ids[-1]
        self._rows["num_tokens"][row] = num_tokens
        if (mask := begun.sampling_mask) is not None:
            self._members[row].kept_ids = np.split(mask.kept_ids, np.cumsum(mask.num_kept, dtype=np.int64)[:-1])

    def sampling(self, device: torch.device) -> RowSampling:
        """Every row's settings; they change only when rows come or go."""
        rows = self.active
        return RowSampling(
            temperature=_tensor(rows["temperature"], device),
            is_greedy=_tensor(rows["is_greedy"], device),
            top_p=_tensor(rows["top_p"], device),
            top_k=_tensor(rows["top_k"], device),
            is_truncated=any(member.task.prompt.sampling.is_truncated for member in self._members),
            has_greedy=bool(rows["is_greedy"].any()),
        )

    def uniform(self) -> npt.NDArray[np.float64]:
        """The number that draws each row's next token, [n]."""
        drawn: npt.NDArray[np.float64] = self._tokens["uniform"][
            self._range[: self.num_rows], self.active["num_tokens"]
        ]
        return drawn

    def record(self, token_ids: Ints, logprobs: npt.NDArray[np.float32], weight_version: int) -> None:
        """Append one token to every row."""
        rows = self.active
        at = (self._range[: self.num_rows], rows["num_tokens"])
        self._tokens["id"][at] = token_ids
        self._tokens["logprob"][at] = logprobs
        self._tokens["version"][at] = weight_version
        rows["next_id"] = token_ids
        rows["num_tokens"] += 1
        rows["length"] += 1

    def keep_survivors(self, kept: Bools) -> None:
        """Remember which ids could be drawn in this step, [n, V], for the rows that ask for it."""
        for row in np.flatnonzero(self.active["keeps_mask"]):
            self._members[row].kept_ids.append(np.flatnonzero(kept[row]).astype(np.uint32))

    def keep_routed(self, ids: ExpertIds) -> None:
        """Remember the experts of the token that each row reads in this step, [n, layers, top_k], where asked for."""
        for row in np.flatnonzero(self.active["keeps_routing"]):
            self._members[row].routed.append(ids[row : row + 1])

    def token_ids(self, row: int, last: int | None = None) -> list[int]:
        """The tokens of a row so far, or only the last few."""
        end = int(self._rows["num_tokens"][row])
        first = 0 if last is None else max(0, end - last)
        ids: list[int] = self._tokens["id"][row, first:end].tolist()
        return ids

    def member(self, row: int) -> tuple[GroupTask, int]:
        """Whose row it is: the group, and which of its completions."""
        return self._members[row].task, self._members[row].index

    def rows_of(self, tasks: Sequence[GroupTask]) -> Bools:
        """Which rows belong to these groups, [n]."""
        return np.array([member.task in tasks for member in self._members], dtype=bool)

    def completion(self, row: int, reason: FinishReason, text: str) -> Completion:
        """What a row amounts to."""
        drawn, routed = self.unfinished(row), self._members[row].routed
        return Completion(
            token_ids=drawn.token_ids,
            generator_logprobs=drawn.generator_logprobs,
            loss_mask=np.ones(len(drawn), dtype=np.uint8),
            spans=drawn.spans,
            finish_reason=reason,
            text=text,
            sampling_mask=drawn.sampling_mask,
            routed_experts=RoutedExperts(ids=np.concatenate(routed), num_experts=self._num_experts)
            if routed and self._rows["keeps_routing"][row]
            else None,
        )

    def unfinished(self, row: int) -> UnfinishedCompletion:
        """What a row, in which at least one token has been drawn, amounts to so far."""
        tokens = self._tokens[row, : self._rows["num_tokens"][row]]
        versions = tokens["version"]
        starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()]
        kept = self._members[row].kept_ids
        return UnfinishedCompletion(
            token_ids=tokens["id"].copy(),
            generator_logprobs=tokens["logprob"].copy(),
            spans=tuple(VersionSpan(weight_version=int(versions[start]), first_token=start) for start in starts),
            sampling_mask=SamplingMask(
                kept_ids=np.concatenate(kept), num_kept=np.array([len(ids) for ids in kept], dtype=np.uint32)
            )
            if kept and len(kept) == len(tokens)  # it may have been begun by an engine that keeps none
            else None,
        )

    def remove(self, gone: Bools) -> tuple[Ints, Ints]:
        """Close the gaps that `gone` [n] leaves: row holes[i] is now what movers[i] was."""
        remaining = self.num_rows - int(gone.sum())
        holes = np.flatnonzero(gone[:remaining])
        movers = np.flatnonzero(~gone[remaining:]) + remaining
        self._rows[holes] = self._rows[movers]
        self._tokens[holes] = self._tokens[movers]
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            self._members[hole] = self._members[mover]
        del self._members[remaining:]
        self.num_rows = remaining
        return holes, movers


def _tensor(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(column.copy()).to(device)
