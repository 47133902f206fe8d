"""Lives of a trainer: what one that is killed leaves, and what of a run is in the weights that survive."""

from __future__ import annotations

import json
from typing import Any

from pipeline.checkpoints import Checkpoint, Checkpoints
from tests.integration.harness import Run
from tests.integration.processes import Worker


def surviving(run: Run) -> list[dict[str, Any]]:
    """Samples of the steps that the final weights went through: where a step was done again, the last ones."""
    last_life: dict[int, list[dict[str, Any]]] = {}
    before, num_of_a_step = 0, run.config.trainer.groups_per_step
    for sample in run.samples:
        step = sample["step"]
        if step < before or len(last_life.get(step, ())) == num_of_a_step:
            last_life = {known: rest for known, rest in last_life.items() if known < step}
        last_life.setdefault(step, []).append(sample)
        before = step
    return [sample for step in sorted(last_life) for sample in last_life[step]]


def newest_checkpoint(run: Run) -> Checkpoint | None:
    """The one that a successor goes on from; None before the first."""
    return Checkpoints(run.config.run_dir / "checkpoints", run.config.checkpoint).latest()


async def newest_version(run: Run) -> int:
    """The highest number of weights that a trainer has given, also one that was killed before it said so to others."""
    remembered = json.loads((run.config.run_dir / "run.json").read_text())["weight_version"]
    return max(await run.fleet.version() or 0, remembered)


async def killed_between_checkpoints(run: Run, trainer: Worker) -> int:
    """Kill a trainer when a checkpoint holds some of what it has trained and misses some; the checkpoint's step."""

    async def is_between() -> bool:
        saved, ledger = newest_checkpoint(run), await run.ledger()
        return saved is not None and ledger.uncommitted == ledger.trained - 4 * saved.step > 0

    await run.until_stopped([trainer], is_between, "groups that are trained and in no checkpoint")
    trainer.kill()
    saved = newest_checkpoint(run)
    assert saved is not None
    return saved.step


def versions_of(samples: list[dict[str, Any]]) -> list[int]:
    """Every weight version that has sampled a token, in the order of training."""
    return [version for sample in samples for item in sample["completions"] for version, _ in item["versions"]]
