"""How weights travel on one machine and between several: against a bare socket, to eight at once, and what is sent.

In: a size. Out: rates and times of real processes as ratios, measured in turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.weight_fleet import Model, Receiver, Trainer, bare_sender, update
from benchmarks.weight_states import Scale
from pipeline.config import WeightSettings
from pipeline.weights.sealed import digest

_NUM_LOCAL = 8
_NUM_RELAYED = 8
_SMALL_TILE_BYTES = 1 << 20
_SNAPSHOT = WeightSettings(encoding="snapshot", share_on_host=False)
_DELTA = WeightSettings(encoding="delta")


def measure(scale: Scale) -> dict[str, object]:
    """One section after the other: what runs beside a measurement is measured."""
    model = Model(scale.num_bytes)
    return {
        **_against_bare_socket(model, scale.rounds),
        **_eight_local(model, scale.rounds),
        **_egress(model),
    }


def _against_bare_socket(model: Model, rounds: int) -> Mapping[str, float]:
    """A snapshot, from the request for its manifest to its last proved tile, and the same bytes from a bare socket."""
    small = _SNAPSHOT.model_copy(update={"tile_bytes": _SMALL_TILE_BYTES})
    with ExitStack() as stack:
        ends = []
        for settings in (_SNAPSHOT, small):
            trainer = stack.enter_context(Trainer(model, settings))
            trainer.publish()
            ends.append((trainer, stack.enter_context(Receiver(settings, trainer.endpoints))))
        host, port = stack.enter_context(bare_sender(model.num_bytes))
        (trainer, receiver), (_, receiver_of_small) = ends
        rows = []
        for _ in range(rounds + 1):
            sender_s = time.process_time()  # of this process, which sends meanwhile and does nothing else
            raw = receiver.ask("raw", host=host, port=port, num_bytes=model.num_bytes)
            sender_s, server_s = time.process_time() - sender_s, _busy_s(trainer)
            ours = receiver.ask("next", above=None)
            row = {"raw": _took_s(raw), "ours": _took_s(ours), "raw_processor": raw["cpu_s"] + sender_s}
            row["processor"] = ours["cpu_s"] + _busy_s(trainer) - server_s
            row["small_tiles"] = _took_s(receiver_of_small.ask("next", above=None))
            rows.append({**row, "prove": _prove_s(model.num_bytes)})
    rows = rows[1:]
    pairs = [row["raw"] / row["ours"] for row in rows]
    return {
        "snapshot_vs_raw_socket": round(statistics.median(pairs), 3),
        "snapshot_vs_raw_socket_worst": round(min(pairs), 3),
        "snapshot_vs_raw_socket_fastest": round(min(row["raw"] for row in rows) / min(row["ours"] for row in rows), 3),
        "snapshot_vs_raw_socket_small_tiles": round(
            statistics.median(row["raw"] / row["small_tiles"] for row in rows), 3
        ),
        "raw_socket_gb_per_s": round(model.num_bytes / 1e9 / statistics.median(row["raw"] for row in rows), 2),
        **{f"snapshot_{name}_s": round(statistics.median(row[name] for row in rows), 4) for name in rows[0]},
    }


def _took_s(answer: Mapping[str, float]) -> float:
    return answer["at"] - answer["began"]


def _prove_s(num_bytes: int) -> float:
    """Seconds of a core for hashing tile by tile and copying, once: what a snapshot costs beside its way."""
    tile = np.ones(1 << 20, dtype=np.uint8)
    target = np.zeros(num_bytes, dtype=np.uint8)
    began = time.thread_time()
    for start in range(0, num_bytes, len(tile)):
        digest(tile.data)
        np.copyto(target[start : start + len(tile)], tile[: num_bytes - start])
    return time.thread_time() - began


def _busy_s(trainer: Trainer) -> float:
    spent = trainer.process.cpu_times()
    return float(spent.user + spent.system)


def _eight_local(model: Model, rounds: int) -> Mapping[str, float]:
    """Until all engines of a machine have mapped an update, for eight of them and for one.

    What is behind the first of eight is the waking up of processes, on whatever cores there are.
    """
    with ExitStack() as stack:
        fleets = {}
        for num in (1, _NUM_LOCAL):
            trainer = stack.enter_context(Trainer(model, _DELTA))
            folder = stack.enter_context(tempfile.TemporaryDirectory()) + "/weights"
            receivers = [stack.enter_context(Receiver(_DELTA, trainer.endpoints, folder=folder)) for _ in range(num)]
            update(trainer, receivers)
            fleets[num] = trainer, receivers
        rows = []
        for _ in range(rounds + 1):
            row = {}
            for num, (trainer, receivers) in fleets.items():
                row[f"mapped_{num}"], answers = update(trainer, receivers)
                row[f"mapped_first_of_{num}"] = row[f"mapped_{num}"] - _spread_s(answers)
                for receiver in receivers:
                    receiver.tell("apply")
                applied = [receiver.answer() for receiver in receivers]
                row[f"apply_{num}"] = max(item["at"] for item in applied) - min(item["began"] for item in applied)
            rows.append(row)
    rows = rows[1:]  # the first has no patches yet, and fresh memory
    pairs = [row[f"mapped_{_NUM_LOCAL}"] / row["mapped_1"] for row in rows]
    return {
        "eight_local_vs_one": round(statistics.median(pairs), 3),
        "eight_local_vs_one_worst": round(max(pairs), 3),
        **{f"local_{name}_s": round(statistics.median(row[name] for row in rows), 4) for name in rows[0]},
    }


def _spread_s(answers: Sequence[Mapping[str, float]]) -> float:
    """Between the first and the last of them."""
    return max(answer["at"] for answer in answers) - min(answer["at"] for answer in answers)


def _egress(model: Model) -> Mapping[str, float]:
    """What the trainer sends for eight relayed receivers, over what one of them needs: for a snapshot, then a delta."""
    settings = WeightSettings(encoding="delta", relay=True)
    found = {}
    with ExitStack() as stack:
        trainer = stack.enter_context(Trainer(model, settings))
        receivers = [stack.enter_context(Receiver(settings, trainer.endpoints)) for _ in range(_NUM_RELAYED)]
        tree = [(f"machine-{number}", receiver.relay) for number, receiver in enumerate(receivers)]
        for (name, _), receiver in zip(tree, receivers, strict=True):
            receiver.ask("tree", relays=tree, name=name)
        sent_before = received_before = 0
        for kind in ("snapshot", "delta"):
            _, answers = update(trainer, receivers)
            sent, received = trainer.sent_bytes(), int(answers[-1]["num_received_bytes"])
            found[f"egress_payloads_8_{kind}"] = round((sent - sent_before) / (received - received_before), 3)
            sent_before, received_before = sent, received
    return found
