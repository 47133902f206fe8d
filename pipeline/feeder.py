"""The feeder: puts prompts on the first stream, never more than admission allows.

In: a prompt source and the trainer's version. Out: prompt groups on `prompts`. The bound on live
groups bounds every stream behind it, so nothing ever has to be trimmed.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pipeline.messages import PromptGroup
from pipeline.prompts import PromptSource
from pipeline.streams import Entry, Streams
from pipeline.wire import encode


def prompt_entry(group: PromptGroup, *, ordinal: int | None = None) -> Entry:
    """The stream entry of a prompt group. ordinal: of a group that is fed for the first time."""
    return Entry(
        group_id=group.group_id,
        weight_version=group.fed_version,
        payload=encode(group),
        is_evaluation=group.is_evaluation,
        ordinal=ordinal,
    )


def stamped(group: PromptGroup, *, version: int, min_version: int) -> PromptGroup:
    """The group as fed at `version`, to be generated with `min_version` or newer."""
    return dataclasses.replace(
        group,
        fed_version=version,
        min_version=min_version,
        hops={**group.hops, "fed": time.time()},
    )


def oldest_useful_version(version: int, num_ahead: int, *, groups_per_step: int, max_staleness: int) -> int:
    """The oldest weights that may generate a group fed now.

    With `num_ahead` live groups before it the group is trained at version + num_ahead //
    groups_per_step. Generated with older weights than that minus max_staleness, its tokens would
    be past the bound before anyone trained on them.
    """
    return min(version, max(0, version + num_ahead // groups_per_step - max_staleness))


class Feeder:
    """Feeds one run's training prompts, in order, each once.

    groups_per_step, max_staleness: as in the trainer's settings; they decide which weights are
    new enough for a prompt.
    """

    def __init__(self, streams: Streams, source: PromptSource, *, groups_per_step: int, max_staleness: int) -> None:
        self._streams = streams
        self._source = source
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._taken: deque[PromptGroup] = deque()  # from the source, and not known to be fed
        self._lost: deque[PromptGroup] = deque()
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether the data set has no more prompts to give."""
        return self._has_ended and not self._taken and not self._lost

    @property
    def cursor(self) -> int:
        """Ordinal of the next group to be fed."""
        return self._taken[0].ordinal if self._taken else self._source.cursor

    def feed_again(self, groups: Iterable[PromptGroup]) -> None:
        """Groups whose effect was lost with the weights; they go before all others."""
        self._lost.extend(groups)

    async def top_up(self, *, version: int, limit: Callable[[], int]) -> int:
        """Feed until `limit()` groups are live or the data ends. Returns how many were fed.

        The limit is asked for when the number of live groups is known: one from before a step would let groups
        in for that step, too, whose places are free by then; at the end of a run nobody would train them.
        """
        live = (await self._streams.ledger()).live
        most = limit()
        if self._lost:
            return await self._feed_lost(version, live=live, limit=most)
        groups = self._stamp(self._take(most - live), version, live)
        if not groups:
            return 0
        entries = [prompt_entry(group, ordinal=group.ordinal) for group in groups]
        # Whoever goes on from the cursor meanwhile, or after this was broken off, must not go on behind them. Those
        # that were fed all the same are known by their ordinals, and are not fed twice.
        self._taken.extendleft(reversed(groups))
        accepted = await self._streams.feed(entries, limit=most)
        for _ in range(accepted):
            self._taken.popleft()
        return accepted

    async def put_back_lost(self, *, version: int) -> None:
        """At the end of a run: what nobody has trained anew is not trained. It is live, for a run that goes on."""
        live = (await self._streams.ledger()).live
        await self._feed_lost(version, live=live, limit=live + len(self._lost))

    async def _feed_lost(self, version: int, *, live: int, limit: int) -> int:
        lost = self._stamp(list(self._lost)[: max(0, limit - live)], version, live)
        accepted = await self._streams.refeed_uncommitted([prompt_entry(group) for group in lost], limit=limit)
        for _ in range(accepted):
            self._lost.popleft()
        return accepted

    def _stamp(self, groups: Sequence[PromptGroup], version: int, num_ahead: int) -> list[PromptGroup]:
        return [
            stamped(group, version=version, min_version=self._min_version(version, num_ahead + position))
            for position, group in enumerate(groups)
        ]

    def again(self, groups: Sequence[PromptGroup], *, version: int) -> list[Entry]:
        """Entries that feed the prompts of dropped groups once more, under new ids."""
        return [
            prompt_entry(
                dataclasses.replace(stamped(group, version=version, min_version=version), group_id=f"{group.group_id}+")
            )
            for group in groups
        ]

    def _min_version(self, version: int, num_ahead: int) -> int:
        return oldest_useful_version(
            version, num_ahead, groups_per_step=self._groups_per_step, max_staleness=self._max_staleness
        )

    def _take(self, wanted: int) -> list[PromptGroup]:
        taken: list[PromptGroup] = []
        while len(taken) < wanted:
            group = self._taken.popleft() if self._taken else self._source.next_group(0, 0)
            if group is None:
                self._has_ended = True
                break
            taken.append(group)
        return taken
