"""The collector: holds scored groups between the stream and the optimiser step.

In: leases of `scored`. Out: batches of groups that may be trained at the trainer's version; what
may not is dropped with a reason and its slot freed. A group stays leased until it is trained, so
a trainer that dies loses none.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.config import AlgorithmSettings, StalenessSettings
from pipeline.errors import MessageError, RunStalledError
from pipeline.feeder import Feeder
from pipeline.filters import is_nonfinite, is_unscored, is_zero_variance
from pipeline.keys import Stream
from pipeline.messages import ScoredGroup
from pipeline.staleness import assess
from pipeline.streams import DropReason, Lease, LeaseKeeper, Streams
from pipeline.wire import decode, encode

_CLAIM_WAIT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldGroup:
    """A scored group and the lease under which it is held."""

    lease: Lease
    group: ScoredGroup

    @property
    def order(self) -> tuple[int, str]:
        """Oldest first."""
        return (self.group.rollout.prompt.ordinal, self.lease.group_id)


class Collector:
    """Prefetches scored groups and makes batches of them.

    max_held: groups leased at once: the batch in the step and the next one.
    on_evaluation: receives the groups that are not for training.
    """

    def __init__(
        self,
        streams: Streams,
        keeper: LeaseKeeper,
        feeder: Feeder,
        *,
        groups_per_step: int,
        max_payload_bytes: int,
        staleness: StalenessSettings,
        algorithm: AlgorithmSettings,
        on_evaluation: Callable[[ScoredGroup], None],
    ) -> None:
        self._streams = streams
        self._keeper = keeper
        self._feeder = feeder
        self._groups_per_step = groups_per_step
        self._max_payload_bytes = max_payload_bytes
        self._staleness = staleness
        self._algorithm = algorithm
        self._on_evaluation = on_evaluation
        self._held: list[HeldGroup] = []
        self._num_in_step = 0
        self._changed = asyncio.Event()
        self.dropped: Counter[DropReason] = Counter()
        self.num_dead = 0

    async def run(self) -> None:
        """Claim for ever, as far as there is room."""
        while True:
            room = 2 * self._groups_per_step - len(self._held) - self._num_in_step
            if room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            leases = await self._streams.claim(Stream.SCORED, room, block_s=_CLAIM_WAIT_S)
            for lease in self._keeper.hold(leases):
                await self._take(lease)
            if leases:
                self._changed.set()

    async def _take(self, lease: Lease) -> None:
        try:
            group = decode(lease.payload, ScoredGroup, max_bytes=self._max_payload_bytes)
        except MessageError as error:
            self._keeper.drop([lease])
            self.num_dead += await self._streams.dead_letter(lease, str(error))
            return
        if group.rollout.prompt.is_evaluation:
            self._on_evaluation(group)
            await self._streams.finish_evaluation([lease])
            self._keeper.drop([lease])
            return
        # One that was lost and has come back takes the place of what was held before.
        self._held = [held for held in self._held if held.lease.entry_id != lease.entry_id]
        self._held.append(HeldGroup(lease=lease, group=group))

    async def next_batch(self, version: int, *, on_wait: Callable[[], None] = lambda: None) -> list[HeldGroup]:
        """The next groups to train at `version`, oldest first.

        Fewer than groups_per_step, or none, where the data has ended and nothing more can come.
        Raises RunStalledError when the filters leave nothing over max_refill batches.
        """
        num_filtered = 0
        while True:
            self._changed.clear()
            num_filtered += await self._filter(version)
            self._refuse_to_starve(num_filtered)
            if len(self._held) >= self._groups_per_step or await self._nothing_more_comes():
                batch = sorted(self._held, key=lambda held: held.order)[: self._groups_per_step]
                self._held = [held for held in self._held if held not in batch]
                self._num_in_step = len(batch)
                return batch
            on_wait()
            try:
                async with asyncio.timeout(_CLAIM_WAIT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def finish(self, batch: Sequence[HeldGroup]) -> int:
        """Count a trained batch and free its slots. Returns how many leases had been lost."""
        prompts = {held.lease.group_id: encode(held.group.rollout.prompt) for held in batch}
        refused = await self._streams.finish_training([held.lease for held in batch], prompts)
        self._keeper.drop([held.lease for held in batch])
        self._num_in_step = 0
        self._changed.set()
        return len(refused)

    async def _filter(self, version: int) -> int:
        """Drop what may not be trained at `version`. Returns how many groups that were."""
        self._held = [held for held in self._held if not self._keeper.is_lost(held.lease)]
        by_reason: dict[DropReason, list[HeldGroup]] = {}
        for held in self._held:
            reason = self._drop_reason(held.group, version)
            if reason is not None:
                by_reason.setdefault(reason, []).append(held)
        for reason, dropped in by_reason.items():
            again = dropped if self._staleness.requeue and reason is DropReason.STALE else []
            refeed = self._feeder.again([held.group.rollout.prompt for held in again], version=version)
            leases = [held.lease for held in dropped]
            self.dropped[reason] += await self._streams.drop(leases, reason, refeed=refeed)
            self._keeper.drop(leases)
            self._held = [held for held in self._held if held not in dropped]
        return sum(len(dropped) for dropped in by_reason.values())

    def _drop_reason(self, group: ScoredGroup, version: int) -> DropReason | None:
        """Why the group may not be trained at `version`; None when it may."""
        if is_unscored(group):
            return DropReason.UNSCORED
        if is_nonfinite(group):
            return DropReason.NONFINITE
        if not assess(group, version, self._staleness).keep:
            return DropReason.STALE
        if self._algorithm.drop_zero_variance and is_zero_variance(group):
            return DropReason.ZERO_VARIANCE
        return None

    def _refuse_to_starve(self, num_filtered: int) -> None:
        most = self._algorithm.max_refill * self._groups_per_step
        if num_filtered < most or self._held:
            return
        reasons = ", ".join(f"{reason.value}: {count}" for reason, count in self.dropped.items())
        raise RunStalledError(
            f"{num_filtered} groups in a row were filtered and none was left to train ({reasons}). "
            "Look at the rewards with `rollstream rollouts tail`; algorithm.max_refill sets how long to go on."
        )

    async def _nothing_more_comes(self) -> bool:
        if not self._feeder.has_ended:
            return False
        ledger = await self._streams.ledger()
        return ledger.live <= len(self._held)
