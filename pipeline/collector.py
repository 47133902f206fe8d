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
from pipeline.filters import is_nonfinite, is_out_of_range, is_taught, is_unscored, is_zero_variance, reward_problem
from pipeline.keys import Stream
from pipeline.messages import ScoredGroup
from pipeline.staleness import version_range
from pipeline.streams import DropReason, Lease, LeaseKeeper, Streams
from pipeline.wire import decode, encode

_CLAIM_WAIT_S = 0.5
# Groups whose rewards say what the policy can do with the prompt, although nothing is to be learnt from them.
_TELLING = frozenset({DropReason.STALE, DropReason.ZERO_VARIANCE, DropReason.OUT_OF_RANGE})
_FILTERED = frozenset({None, DropReason.ZERO_VARIANCE, DropReason.OUT_OF_RANGE})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldGroup:
    """A scored group and the lease under which it is held.

    versions: oldest and newest of its tokens. flaw: why it may never be trained, whatever its age.
    """

    lease: Lease
    group: ScoredGroup
    versions: tuple[int, int]
    flaw: DropReason | None

    @property
    def num_tokens(self) -> int:
        """Tokens of its completions."""
        return sum(map(len, self.group.rollout.completions))

    @property
    def order(self) -> tuple[int, int, str]:
        """Those whose tokens are oldest go first, then those that were fed first."""
        return (self.versions[0], self.group.rollout.prompt.ordinal, self.lease.group_id)


class Collector:
    """Prefetches scored groups and makes batches of them.

    It holds all groups that admission lets live, so that one that came late can still be trained
    in its turn instead of growing stale behind younger ones.

    on_evaluation: receives the groups that are not for training. on_dead: is told of each group
    that was set aside, and why. on_drop: is told of groups that are about to be dropped, and why.
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
        on_dead: Callable[[Lease, str], None],
        on_drop: Callable[[Sequence[str], DropReason], None],
        on_judged: Callable[[HeldGroup], None],
    ) -> None:
        self._streams = streams
        self._keeper = keeper
        self._feeder = feeder
        self._groups_per_step = groups_per_step
        self._max_held = max(2, staleness.max_staleness + 1) * groups_per_step
        self._max_payload_bytes = max_payload_bytes
        self._staleness = staleness
        self._algorithm = algorithm
        self._on_evaluation = on_evaluation
        self._on_dead = on_dead
        self._on_drop = on_drop
        self._on_judged = on_judged
        self._range = algorithm.group_reward_range
        self._held: list[HeldGroup] = []
        self._num_in_step = 0
        self._changed = asyncio.Event()
        self._last_problem = ""
        self.dropped: Counter[DropReason] = Counter()
        self.dropped_tokens: Counter[DropReason] = Counter()

    async def run(self) -> None:
        """Claim for ever, as far as there is room."""
        while True:
            room = self._max_held - len(self._held) - self._num_in_step
            if room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            num_wanted = min(room, self._groups_per_step)
            leases = await self._streams.claim(Stream.SCORED, num_wanted, block_s=_CLAIM_WAIT_S)
            for lease in self._keeper.hold(leases):
                await self._take(lease)
            if leases:
                self._changed.set()

    async def _take(self, lease: Lease) -> None:
        try:
            group = decode(lease.payload, ScoredGroup, max_bytes=self._max_payload_bytes)
        except MessageError as error:
            await self._set_aside(lease, str(error))
            return
        if group.rollout.prompt.is_evaluation:
            self._on_evaluation(group)
            await self._streams.finish_evaluation([lease])
            self._keeper.drop([lease])
            return
        # One that was lost and has come back takes the place of what was held before.
        self._held = [held for held in self._held if held.lease.entry_id != lease.entry_id]
        fed_version = group.rollout.prompt.fed_version
        versions = version_range(group) or (fed_version, fed_version)
        self._held.append(HeldGroup(lease=lease, group=group, versions=versions, flaw=self._flaw(group)))

    def _flaw(self, group: ScoredGroup) -> DropReason | None:
        self._last_problem = reward_problem(group) or self._last_problem
        has_teacher = self._algorithm.has_teacher and is_taught(group)
        if is_unscored(group) and not has_teacher:
            return DropReason.UNSCORED
        if is_nonfinite(group):
            return DropReason.NONFINITE
        if self._algorithm.resolved.drop_zero_variance and is_zero_variance(group):
            return DropReason.ZERO_VARIANCE
        if is_out_of_range(group, *self._range):
            return DropReason.OUT_OF_RANGE
        return None

    async def _set_aside(self, lease: Lease, reason: str) -> None:
        self._keeper.drop([lease])
        if await self._streams.dead_letter(lease, reason):
            self._on_dead(lease, reason)

    @property
    def num_held(self) -> int:
        """Groups that wait to be trained."""
        return len(self._held)

    async def next_batch(
        self, version: int, *, on_wait: Callable[[int, int], None] = lambda num_dropped, num_dead: None
    ) -> list[HeldGroup]:
        """The next groups to train at `version`, oldest first.

        on_wait: called while there are too few, with how many were filtered, and how many died, since the call.
        Fewer than groups_per_step, or none, where the data has ended and nothing more can come.
        Raises RunStalledError when the filters take max_refill batches' worth of groups for one batch.
        """
        filtered: Counter[DropReason] = Counter()
        num_dead_before = (await self._streams.ledger()).dead
        while True:
            self._changed.clear()
            filtered += await self._filter(version)
            is_last = len(self._held) < self._groups_per_step and await self._nothing_more_comes()
            if not all(self._is_fit(held, version) for held in self._held):
                continue  # it came while others were being filtered
            if is_last or len(self._held) >= self._groups_per_step:
                batch = sorted(self._held, key=lambda held: held.order)[: self._groups_per_step]
                self._held = [held for held in self._held if held not in batch]
                self._num_in_step = len(batch)
                return batch
            num_dead = max(0, (await self._streams.ledger()).dead - num_dead_before)
            self._refuse_to_starve(filtered, num_dead)
            on_wait(filtered.total(), num_dead)
            try:
                async with asyncio.timeout(_CLAIM_WAIT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def finish(self, batch: Sequence[HeldGroup]) -> int:
        """Count a trained batch and free its slots. Returns how many leases had been lost."""
        for held in batch:
            self._on_judged(held)
        prompts = {held.lease.group_id: encode(held.group.rollout.prompt) for held in batch}
        refused = await self._streams.finish_training([held.lease for held in batch], prompts)
        self._keeper.drop([held.lease for held in batch])
        self._num_in_step = 0
        self._changed.set()
        return len(refused)

    async def _filter(self, version: int) -> Counter[DropReason]:
        """Drop what may not be trained at `version`. Returns how many groups that were, by reason."""
        self._held = [held for held in self._held if not self._keeper.is_lost(held.lease)]
        for held in [held for held in self._held if held.versions[1] > version]:
            self._held.remove(held)
            await self._set_aside(
                held.lease,
                f"a token was sampled by weight version {held.versions[1]}, but the trainer is at {version}: "
                "its generator follows another trainer",
            )
        by_reason: dict[DropReason, list[HeldGroup]] = {}
        for held in self._held:
            reason = self._drop_reason(held, version)
            if reason is not None:
                by_reason.setdefault(reason, []).append(held)
        for reason, dropped in by_reason.items():
            again = dropped if self._staleness.requeue and reason is DropReason.STALE else []
            refeed = self._feeder.again([held.group.rollout.prompt for held in again], version=version)
            leases = [held.lease for held in dropped]
            self._on_drop([lease.group_id for lease in leases], reason)
            for held in dropped if reason in _TELLING else ():
                self._on_judged(held)
            self.dropped[reason] += await self._streams.drop(leases, reason, refeed=refeed)
            self.dropped_tokens[reason] += sum(held.num_tokens for held in dropped)
            self._keeper.drop(leases)
            self._held = [held for held in self._held if held not in dropped]
        return Counter({reason: len(dropped) for reason, dropped in by_reason.items()})

    def _is_fit(self, held: HeldGroup, version: int) -> bool:
        return held.versions[1] <= version and self._drop_reason(held, version) is None

    def _drop_reason(self, held: HeldGroup, version: int) -> DropReason | None:
        """Why the group may not be trained at `version`; None when it may."""
        is_over = version - held.versions[0] > self._staleness.max_staleness
        if is_over and self._staleness.policy == "drop" and held.flaw in _FILTERED:
            return DropReason.STALE
        return held.flaw

    def _refuse_to_starve(self, filtered: Counter[DropReason], num_dead: int) -> None:
        max_refill, num_filtered = self._algorithm.max_refill, filtered.total()
        if num_filtered + num_dead < max_refill * self._groups_per_step:
            return
        reasons = ", ".join(f"{reason.value}: {count}" for reason, count in filtered.items())
        raise RunStalledError(
            f"{num_filtered} groups were filtered for one step ({reasons or 'none'}), {num_dead} died, and only "
            f"{len(self._held)} of {self._groups_per_step} are left to train; algorithm.max_refill = {max_refill} "
            f"sets after how many batches' worth to give up. {self._why_they_starve(filtered, num_dead)}"
        )

    def _why_they_starve(self, filtered: Counter[DropReason], num_dead: int) -> str:
        """Where to look, for what there was; what is said last is nearest to the cause."""
        unscored = "No reward applied: every function returned None for all completions"
        if self._last_problem:
            unscored = f"The last reward error: {self._last_problem}"
        hints = {
            DropReason.STALE: "Generators are too far behind: raise staleness.max_staleness",
            DropReason.ZERO_VARIANCE: "Prompts that are too easy or too hard teach nothing: look at the rewards",
            DropReason.OUT_OF_RANGE: "Prompts are harder than algorithm.min_group_reward or easier than "
            "algorithm.max_group_reward: widen the range",
            DropReason.NONFINITE: "No token had a finite logprob: look at the generators",
            DropReason.UNSCORED: unscored,
        }
        dead = ["`rollstream streams dead-letters` shows why groups died"] if num_dead else []
        return ". ".join([*dead, *(hint for reason, hint in hints.items() if filtered[reason])])

    async def _nothing_more_comes(self) -> bool:
        if not self._feeder.has_ended:
            return False
        ledger = await self._streams.ledger()
        return ledger.live <= len(self._held)
