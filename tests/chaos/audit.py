"""What has become of every group, from what the run has written down: ids, not counters.

In: the checkpoints of a run that has ended, its dead letters, its record of drops and its streams.
Out: the ids that are in no place, and those that are in two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pipeline.checkpoints import Checkpoints
from pipeline.keys import Stream
from pipeline.records.recorder import DROPPED_FILE
from pipeline.streams import Ledger
from tests.integration.harness import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Ids by what became of them.

    committed: id -> in how many checkpoints of the surviving chain its effect was said to begin.
    dead: id -> reason. dropped: id -> reason.
    """

    fed: frozenset[str]
    committed: Counter[str]
    dead: dict[str, str]
    dropped: dict[str, str]
    live: frozenset[str]
    ledger: Ledger

    @property
    def lost(self) -> list[str]:
        """Fed, and in no place."""
        found = self.committed.keys() | self.dead.keys() | self.dropped.keys() | self.live
        return sorted(self.fed - found)

    @property
    def trained_twice(self) -> list[str]:
        """In two checkpoints' new effects, or trained and still there to be trained."""
        twice = {group_id for group_id, times in self.committed.items() if times > 1}
        return sorted(twice | (self.committed.keys() & (self.dead.keys() | self.dropped.keys() | self.live)))

    @property
    def problems(self) -> list[str]:
        """Everything that does not add up."""
        ledger = self.ledger
        found = [f"lost: {self.lost}"] if self.lost else []
        found += [f"trained twice: {self.trained_twice}"] if self.trained_twice else []
        found += [] if ledger.balances else [f"the ledger does not balance: {ledger.equation}"]
        counted = {
            "trained": (ledger.trained, self.committed.total()),
            "dropped": (ledger.num_dropped, len(self.dropped)),
            "dead": (ledger.dead, len(self.dead)),
            "live": (ledger.live, len(self.live)),
            "uncommitted": (ledger.uncommitted, 0),
        }
        return found + [f"{name}: {a} in the ledger, {b} by id" for name, (a, b) in counted.items() if a != b]


async def audit(run: Run, *, foreign: frozenset[str] = frozenset()) -> Audit:
    """Of a run that has ended. foreign: ids that were put into its streams from outside."""
    ledger = await run.streams.ledger()
    kept = Checkpoints(run.config.run_dir / "checkpoints", run.config.checkpoint).list()
    committed = Counter(str(group_id) for checkpoint in kept for group_id in checkpoint.state["committed"])
    letters = await run.streams.dead_letters()
    live = [entry.group_id for stream in Stream for entry in await run.streams.peek(stream, 1 << 20)]
    dropped = {record["group_id"]: record["reason"] for record in run.records(DROPPED_FILE)}
    return Audit(
        fed=frozenset(f"{ordinal:08d}" for ordinal in range(ledger.next_ordinal)) | foreign,
        committed=committed,
        dead={letter.group_id: letter.reason for letter in letters},
        # A trainer that was killed on the way from the record to the drop has not dropped it.
        dropped={group_id: reason for group_id, reason in dropped.items() if group_id not in committed},
        live=frozenset(live),
        ledger=ledger,
    )
