"""What has become of every group, and how full the streams are.

In: replies of the scripts `ledger` and `depths`. Out: frozen views of one instant. The counters
are kept by the same Lua calls that move groups; `live` is counted anew from the streams
themselves, so that `balances` compares two independent accounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.keys import Stream


class DropReason(StrEnum):
    """Why a group was not trained on."""

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    OUT_OF_RANGE = "out_of_range"
    UNSCORED = "unscored"
    TOO_LONG = "too_long"
    NONFINITE = "nonfinite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where all groups of a run are, at one instant.

    fed: groups accepted into `prompts`. trained: in an optimiser step; `uncommitted` of them in
    weights that no checkpoint holds yet. dropped: reason -> groups. dead: in dead_letters.
    live: in the three streams. refused: results of workers that had lost their lease; they are no
    groups of their own. eval_*: the same for evaluation groups. next_ordinal: of the feeding
    order, all smaller ones have been fed.
    """

    fed: int = 0
    trained: int = 0
    uncommitted: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    dead: int = 0
    live: int = 0
    refused: int = 0
    eval_fed: int = 0
    eval_done: int = 0
    eval_dead: int = 0
    eval_live: int = 0
    next_ordinal: int = 0

    @property
    def num_dropped(self) -> int:
        """Groups dropped for any reason."""
        return sum(self.dropped.values())

    @property
    def balances(self) -> bool:
        """Whether no group is missing and none is counted twice."""
        training = self.trained + self.num_dropped + self.dead + self.live
        evaluation = self.eval_done + self.eval_dead + self.eval_live
        return self.fed == training and self.eval_fed == evaluation

    @property
    def equation(self) -> str:
        """`fed 12 = trained 8 + dropped 1 (stale 1) + dead 0 + live 3`, as every command says it."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items() if count)
        dropped = f"{self.num_dropped} ({reasons})" if reasons else "0"
        return f"fed {self.fed} = trained {self.trained} + dropped {dropped} + dead {self.dead} + live {self.live}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How full one stream is.

    length: groups in it. pending: claimed by a worker. backlog: waiting for one.
    oldest_pending_s, oldest_waiting_s: since the oldest such group arrived; 0 when there is none.
    holders: worker id -> groups that it has claimed.
    """

    length: int
    pending: int
    backlog: int
    oldest_pending_s: float
    oldest_waiting_s: float
    holders: Mapping[str, int] = field(default_factory=dict)


def read_ledger(reply: tuple[list[bytes], int, int, int]) -> Ledger:
    """The ledger in a reply: [counters as a flat list, live, live for evaluation, uncommitted]."""
    flat, live, eval_live, uncommitted = reply
    counters = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
    prefix = "dropped:"
    return Ledger(
        fed=counters.get("fed", 0),
        trained=counters.get("trained", 0),
        uncommitted=uncommitted,
        dropped={name.removeprefix(prefix): n for name, n in sorted(counters.items()) if name.startswith(prefix) and n},
        dead=counters.get("dead", 0),
        live=live - eval_live,
        refused=counters.get("refused", 0),
        eval_fed=counters.get("eval_fed", 0),
        eval_done=counters.get("eval_done", 0),
        eval_dead=counters.get("eval_dead", 0),
        eval_live=eval_live,
        next_ordinal=counters.get("next_ordinal", 0),
    )


def read_depths(reply: Sequence[tuple[int, int, int, int, list[tuple[bytes, bytes]]]]) -> dict[Stream, Depth]:
    """Depths in a reply: for each stream [length, pending, oldest pending ms, oldest waiting ms, holders]."""
    return {
        stream: Depth(
            length=length,
            pending=pending,
            backlog=length - pending,
            oldest_pending_s=pending_ms / 1000,
            oldest_waiting_s=waiting_ms / 1000,
            holders={consumer.decode("utf-8", "replace"): int(number) for consumer, number in holders},
        )
        for stream, (length, pending, pending_ms, waiting_ms, holders) in zip(Stream, reply, strict=True)
    }
