"""What publishing costs who trains, and what the processes hold for it.

In: a size. Out: the time of optimiser steps of a real model with a publish after each, over steps
without; and the most memory that a publisher process and a receiver have had, over the model's size.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.weight_fleet import Model, Receiver, Trainer, pinned, update
from benchmarks.weight_states import Scale
from pipeline.config import WeightSettings
from pipeline.weights import WeightKind, WeightState
from pipeline.weights.process import PublisherProcess

_NUM_TOKENS = 512  # of a step: fewer than one group of short completions has
_VOCABULARY = 4096
_LAYER = 512  # wide: 3.4 million parameters
_LAYER_BYTES = 2 * (4 * _LAYER * _LAYER + 3 * _LAYER * 3 * _LAYER)  # in bfloat16
_NUM_UPDATES = 6  # until every buffer has been used


def measure(scale: Scale) -> dict[str, object]:
    """Steps first: memory is for what comes after."""
    return {**_steps(scale), **_memory(Model(scale.num_bytes))}


def _steps(scale: Scale) -> Mapping[str, object]:
    """Trainer on one core; publisher, and a receiver that wants patches, on the other."""
    num_layers = max(1, round((scale.num_bytes - 2 * _VOCABULARY * _LAYER) / _LAYER_BYTES))
    with ExitStack() as stack:
        settings = WeightSettings(encoding="delta")
        with pinned(1):
            publisher = stack.enter_context(PublisherProcess(settings))
            receiver = stack.enter_context(Receiver(settings, publisher.start()))
        stack.enter_context(pinned(0))
        step, export = _training(num_layers)
        version = 0

        def publish() -> None:
            nonlocal version
            publisher.publish(export(version))
            version += 1

        for _ in range(2):
            step()
            publish()
        num_bytes = export(version).num_bytes
        receiver.ask("next", above=None)
        rows = []
        for number in range(scale.rounds):
            receiver.tell("next", above=version - 1)
            order = (publish, None) if number % 2 else (None, publish)
            timed = [_timed(step, then) for then in order]
            receiver.answer()
            rows.append((timed[order.index(publish)], timed[order.index(None)]))
    walls, busies = ([ours[at] / bare[at] for ours, bare in rows] for at in (0, 1))
    return {
        "step_time_ratio": round(statistics.median(walls), 4),
        "step_time_ratio_worst": round(max(walls), 4),
        "step_processor_ratio": round(statistics.median(busies), 4),
        "step_processor_ratio_worst": round(max(busies), 4),
        "step_s": round(statistics.median(bare[0] for _, bare in rows), 3),
        "step_publish_s": round(statistics.median(ours[2] for ours, _ in rows), 4),
        "step_model_bytes": num_bytes,
        "step_tokens": _NUM_TOKENS,
    }


def _timed(step: Callable[[], None], publish: Callable[[], None] | None = None) -> tuple[float, float, float]:
    """Seconds by the clock, of this process on a core, and of publishing by the clock."""
    began, busy = time.perf_counter(), time.process_time()
    step()
    trained = time.perf_counter()
    if publish is not None:
        publish()
    ended = time.perf_counter()
    return ended - began, time.process_time() - busy, ended - trained


def _training(num_layers: int) -> tuple[Callable[[], None], Callable[[int], WeightState]]:
    """A step of AdamW on random tokens, and the weights after it in bfloat16, as a trainer exports them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeline.models.weights import export_weights

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=_LAYER,
            intermediate_size=3 * _LAYER,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens = torch.randint(_VOCABULARY, (4, _NUM_TOKENS // 4))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    def export(version: int) -> WeightState:
        tensors = export_weights(model, dtype=torch.bfloat16)
        return WeightState(weight_version=version, kind=WeightKind.SNAPSHOT, tensors=tensors)

    return step, export


def _memory(model: Model) -> Mapping[str, float]:
    """Peak resident memory, less that of the same processes when they held nothing, over the model's size.

    Resident is everything that a process maps, also what it shares: the publisher's slots count in
    full, although they are the trainer's as well. `_hurried`: when versions follow each other as fast
    as they can be copied. `_pss_ratio` divides what is shared, and has the interpreter in it.
    """
    settings = WeightSettings(encoding="delta")
    with ExitStack() as stack:
        trainer = stack.enter_context(Trainer(model, settings))
        folder = stack.enter_context(tempfile.TemporaryDirectory()) + "/weights"
        receiver = stack.enter_context(Receiver(settings, trainer.endpoints, folder=folder))
        ends = {"publisher": trainer.process, "subscriber": psutil.Process(receiver.process.pid)}
        empty = {name: _peak_bytes(process) for name, process in ends.items()}
        shares: dict[str, list[int]] = {name: [] for name in ends}
        for _ in range(_NUM_UPDATES):
            update(trainer, [receiver])
            for name, process in ends.items():
                shares[name].append(process.memory_full_info().pss)
        peaks = {name: (_peak_bytes(process) - empty[name]) / model.num_bytes for name, process in ends.items()}
        receiver.tell("follow", until=trainer.version + _NUM_UPDATES)
        for _ in range(_NUM_UPDATES):
            trainer.publish()
        receiver.answer()
        hurried = {name: (_peak_bytes(process) - empty[name]) / model.num_bytes for name, process in ends.items()}
    return {
        **{f"{name}_memory_ratio": round(peak, 3) for name, peak in peaks.items()},
        **{f"{name}_memory_ratio_hurried": round(peak, 3) for name, peak in hurried.items()},
        **{f"{name}_pss_ratio": round(max(seen) / model.num_bytes, 3) for name, seen in shares.items()},
    }


def _peak_bytes(process: psutil.Process) -> int:
    """The most that was resident at once."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) * 1024
