"""What changed against everything, on links of several rates, and what the channel chooses by itself.

In: a size. Out: seconds from a step that is done until its weights are verified at a receiver in
another process, the making of patches included, as ratios; each sort has a publisher of its own and
they are measured in turn. Links that cannot be shaped here are left out, and the result says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from benchmarks.shaped_link import LOOPBACK, Network, network, why_not
from benchmarks.weight_fleet import Model, Receiver, Trainer, bare_sender, update
from benchmarks.weight_states import Scale
from pipeline.config import WeightSettings

_SORTS = ("delta", "snapshot", "auto")
_RATES = {"10gbit": 10.0, "1gbit": 1.0}
_NUM_SETTLING = 6  # the first of each sort, with fresh memory, and what the choice learns from


def measure(scale: Scale) -> dict[str, object]:
    """The links by name; what is asked for most by a name of its own."""
    model, reason = Model(scale.num_bytes), why_not()
    links = {"loopback": _on(model, LOOPBACK, scale.rounds)}
    if not reason:
        for name, gbit in _RATES.items():
            with network(gbit) as shaped:
                links[name] = _on(model, shaped, scale.rounds)
    return {
        "links_shaped_by": reason or "network namespaces and tbf",
        **({"delta_speedup_1gbit": links["1gbit"]["delta_speedup"]} if "1gbit" in links else {}),
        **({"delta_speedup_1gbit_worst": links["1gbit"]["delta_speedup_worst"]} if "1gbit" in links else {}),
        **{f"choice_vs_best_{name}": row["choice_vs_best"] for name, row in links.items()},
        "links": links,
    }


def _on(model: Model, link: Network, rounds: int) -> Mapping[str, object]:
    with ExitStack() as stack:
        ends = {sort: stack.enter_context(_ends(model, link, sort)) for sort in _SORTS}
        for pair in ends.values():
            for _ in range(_NUM_SETTLING):
                update(pair[0], [pair[1]])
        rows = [_round(ends) for _ in range(rounds)]
        address = stack.enter_context(bare_sender(model.num_bytes, link.host))
        raw = ends["auto"][1].ask("raw", host=address[0], port=address[1], num_bytes=model.num_bytes)
    delta, snapshot = (statistics.median(row[sort] for row in rows) for sort in ("delta", "snapshot"))
    best = "delta" if delta <= snapshot else "snapshot"
    speedups = [row["snapshot"] / row["delta"] for row in rows]
    choices = [row["auto"] / row[best] for row in rows]
    return {
        "delta_speedup": round(statistics.median(speedups), 3),
        "delta_speedup_worst": round(min(speedups), 3),
        "choice_vs_best": round(statistics.median(choices), 3),
        "choice_vs_best_worst": round(max(choices), 3),
        "choice_vs_best_in_all": round(sum(row["auto"] for row in rows) / sum(row[best] for row in rows), 3),
        "best": best,
        "chosen": {sort: sum(row["is_patched"] == (sort == "delta") for row in rows) for sort in _SORTS[:2]},
        **{f"{sort}_s": round(statistics.median(row[sort] for row in rows), 4) for sort in _SORTS},
        "bare_socket_gbit": round(model.num_bytes * 8 / 1e9 / (raw["at"] - raw["began"]), 2),
    }


def _round(ends: Mapping[str, tuple[Trainer, Receiver]]) -> dict[str, float]:
    """A version of each sort; is_patched: whether the choice fell on what changed."""
    row = {}
    trainer, receiver = ends["auto"]
    _, before = update(trainer, [receiver])
    for sort, (trainer, receiver) in ends.items():
        row[sort], after = update(trainer, [receiver])
    row["is_patched"] = after[0]["num_patched"] - before[0]["num_patched"]
    return row


@contextmanager
def _ends(model: Model, link: Network, sort: str) -> Iterator[tuple[Trainer, Receiver]]:
    """A trainer here and a receiver behind the link. Nothing on the way is open to others."""
    settings = WeightSettings.model_validate({"host": link.host, "insecure": True, "encoding": sort})
    with Trainer(model, settings) as trainer, Receiver(settings, trainer.endpoints, through=link.through) as receiver:
        yield trainer, receiver
