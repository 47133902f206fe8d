"""Coming late, and coming back: a joiner while versions go on being published, and a transfer that was cut.

In: a size. Out: the joiner's time until it has what a receiver has that was there all along, over
that of a snapshot when nothing else happens; and what is sent again after a cut.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.cutting_proxy import cutting_proxy
from benchmarks.shaped_link import LOOPBACK, Network, network, why_not
from benchmarks.weight_fleet import Model, Receiver, Trainer, update
from benchmarks.weight_states import Scale
from pipeline.config import WeightSettings

_GBIT = 1.0
_SHORTEST_STEP_S = 0.25  # versions follow each other as quickly as snapshots can, but not more so
_NUM_VERSIONS = 6  # while a joiner comes
_CUT_AT = 0.9


def measure(scale: Scale) -> dict[str, object]:
    """On a link of 1 Gbit/s where one can be made, and on loopback."""
    model, reason = Model(scale.num_bytes), why_not()
    results: dict[str, object] = {"joined_over": reason or f"{_GBIT:g} Gbit/s", **_resumed(model, scale.rounds)}
    loopback = _joined(model, LOOPBACK, scale.rounds)
    if reason:
        return {**results, **loopback}
    with network(_GBIT) as shaped:
        results |= _joined(model, shaped, scale.rounds)
    return {**results, **{f"{name}_loopback": value for name, value in loopback.items()}}


def _joined(model: Model, link: Network, rounds: int) -> Mapping[str, float]:
    """A receiver that is there follows all the time, so that there are patches; another one joins.

    Each round it comes at another moment between two versions: what it has to catch up with depends on it.
    """
    settings = WeightSettings(host=link.host, insecure=True, encoding="delta")
    with ExitStack() as stack:
        trainer = stack.enter_context(Trainer(model, settings))
        there, joiner = (
            stack.enter_context(Receiver(settings, trainer.endpoints, through=link.through)) for _ in range(2)
        )
        for _ in range(2):
            update(trainer, [there])
        _alone_s(joiner)
        rows = []
        for number in range(rounds):
            alone = _alone_s(joiner)
            step_s = max(alone, _SHORTEST_STEP_S)
            after_s = step_s * (number + 0.5) / rounds
            rows.append({"alone": alone, "step": step_s, **_joined_row(trainer, there, joiner, step_s, after_s)})
    pairs = [row["joined"] / row["alone"] for row in rows]
    return {
        "joiner_vs_snapshot": round(statistics.median(pairs), 3),
        "joiner_vs_snapshot_worst": round(max(pairs), 3),
        "joiner_num_patched": statistics.median(row["num_patched"] for row in rows),
        **{
            f"joiner_{name}_s": round(statistics.median(row[name] for row in rows), 4)
            for name in ("alone", "snapshot", "catch_up", "step")
        },
    }


def _alone_s(joiner: Receiver) -> float:
    joiner.ask("join")
    came = joiner.ask("next", above=None)
    return float(came["at"] - came["began"])


def _joined_row(trainer: Trainer, there: Receiver, joiner: Receiver, step_s: float, after_s: float) -> dict[str, float]:
    """The joiner comes `after_s` after the trainer has given away a version.

    joined: seconds until the joiner has what the other one has. Of these, snapshot until it has anything,
    catch_up the rest, in which it got num_patched versions as patches.
    """
    joiner.ask("join")
    last = trainer.version + _NUM_VERSIONS
    there.tell("follow", until=last)
    is_second_out = threading.Event()

    def publish() -> None:
        for number in range(_NUM_VERSIONS):
            trainer.publish()
            if number == 1:
                is_second_out.set()
            time.sleep(step_s)

    publishing = threading.Thread(target=publish)
    publishing.start()
    is_second_out.wait()
    time.sleep(after_s)
    joiner.tell("follow", until=last)
    joined, followed = joiner.answer()["seen"], there.answer()["seen"]
    publishing.join()
    num_patched = next(
        number
        for number, came in enumerate(joined)
        if came["version"] >= max(item["version"] for item in followed if item["at"] <= came["at"])
    )
    snapshot_s, joined_s = (float(joined[at]["at"] - joined[0]["began"]) for at in (0, num_patched))
    return {"joined": joined_s, "snapshot": snapshot_s, "catch_up": joined_s - snapshot_s, "num_patched": num_patched}


def _resumed(model: Model, rounds: int) -> Mapping[str, float]:
    """A snapshot whose connection is cut: bytes after the cut, over those that were missing and one window."""
    settings = WeightSettings(encoding="snapshot")
    ratios, kept = [], []
    with Trainer(model, settings) as trainer:
        trainer.publish()
        for _ in range(rounds):
            with cutting_proxy(trainer.endpoints.tiles, int(_CUT_AT * model.num_bytes)) as proxy:
                endpoints = replace(trainer.endpoints, tiles=proxy.address)
                with Receiver(settings, endpoints) as receiver:
                    receiver.ask("next", above=None)
                missing = model.num_bytes - proxy.num_before
                window = settings.credits * settings.tile_bytes
                ratios.append(proxy.num_after / (missing + window))
                kept.append(1 - proxy.num_after / model.num_bytes)
    return {
        "resume_bytes_ratio": round(statistics.median(ratios), 3),
        "resume_bytes_ratio_worst": round(max(ratios), 3),
        "resume_kept_share": round(statistics.median(kept), 3),
    }
