"""With max_staleness = 0 the pipeline is a synchronous loop, to the last bit (scenario S2).

Also where generation and training take turns on one device, and are never active at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import Config
from pipeline.engines.registry import create_engine
from pipeline.feeder import stamped
from pipeline.keys import Keys, Stream
from pipeline.learner import load_learner
from pipeline.messages import Outcome, RewardResult, RolloutGroup, Score, ScoredGroup
from pipeline.run.data import load_run_data
from pipeline.wire import decode
from tests.integration.harness import Run, running
from tests.integration.rewards import vowels
from tests.integration.turns import Turns, assert_apart, turns_of
from tests.tiny import make_tiny_model

NUM_STEPS = 10


def _settings(directory: Path) -> list[str]:
    make_tiny_model(directory / "model")
    rows = [json.dumps({"prompt": word}) for word in ("abc", "hello", "x", "reverse this", "a b", "zz9")]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return [
        f"model.path={json.dumps(str(directory / 'model'))}",
        f"data.path={json.dumps(str(directory / 'prompts.jsonl'))}",
        "generation.group_size=4",
        "generation.max_tokens=12",
        "generation.temperature=0.8",
        "generation.max_num_seqs=32",
        "generation.num_threads=1",
        "scoring.rewards=[{function='tests.integration.rewards:vowels'}]",
        "scoring.num_processes=1",
        "staleness.max_staleness=0",
        f"trainer.max_steps={NUM_STEPS}",
        "trainer.groups_per_step=4",
        "trainer.learning_rate=0.01",
        "trainer.num_threads=1",
        "checkpoint.every_steps=0",
        "worker.heartbeat_s=0.3",
        "worker.log_format='json'",
        "worker.log_level='debug'",
    ]


async def _plain_loop(config: Config, directory: Path) -> None:
    """Generate, score and train in turn, in this process; saves the final model."""
    torch.set_num_threads(1)
    learner, engine, source = load_learner(config), create_engine(config), load_run_data(config).source
    await engine.start()
    for version in range(NUM_STEPS):
        await engine.apply_weights(learner.export_weights(version))
        prompts = [source.next_group(version, version) for _ in range(config.trainer.groups_per_step)]
        fed = [stamped(prompt, version=version, min_version=version) for prompt in prompts if prompt is not None]
        completed = await asyncio.gather(*(engine.generate(prompt) for prompt in fed))
        groups = []
        for prompt, completions in zip(fed, completed, strict=True):
            values = vowels([], [completion.text for completion in completions])
            parts = [RewardResult(name="vowels", value=value, outcome=Outcome.OK) for value in values]
            scores = tuple(Score(reward=part.value, parts=(part,)) for part in parts)
            rollout = RolloutGroup(prompt=prompt, completions=completions, generator="plain")
            groups.append(ScoredGroup(rollout=rollout, scores=scores, scorer="plain"))
        learner.step(groups, trainer_version=version)
    await engine.close()
    learner.save_model(directory)


async def _watch(run: Run, seen: list[RolloutGroup]) -> None:
    """Rollouts that are handed over, for ever; those that pass while this process computes are missed."""
    name = Keys(run.config.run.name).stream(Stream.ROLLOUTS)
    last: Any = "0-0"
    while True:
        found: Any = await run.redis.xread({name: last}, block=200)
        for _, entries in found:
            last = entries[-1][0]
            seen += [decode(fields[b"payload"], RolloutGroup) for _, fields in entries]


def _assert_made_in(turns: Turns, rollouts: Sequence[RolloutGroup]) -> None:
    assert rollouts
    for rollout in rollouts:
        assert any(start <= rollout.hops["generated"] <= end for start, end in turns), rollout.hops


@pytest.mark.parametrize("topology", ["disaggregated", "colocated"])
async def test_zero_staleness_equals_a_synchronous_loop_bit_for_bit(
    tmp_path: Path, valkey_url: str, run_name: str, topology: str
) -> None:
    words = [*_settings(tmp_path), f"run.topology='{topology}'"]
    async with running(tmp_path, valkey_url, run_name, *words) as run:
        rollouts: list[RolloutGroup] = []
        watching = asyncio.create_task(_watch(run, rollouts))
        trainer = run.start_all()
        await _plain_loop(run.config, tmp_path / "plain")
        assert await run.until_exit(trainer, deadline_s=100) == [0]
        watching.cancel()
        ledger = await run.ledger()
        assert (ledger.trained, ledger.live) == (NUM_STEPS * 4, 0)
        assert all(row["staleness_max"] == 0 for row in run.steps)
        if topology == "colocated":
            training, generating = turns_of(trainer), turns_of(run.workers[0])
            assert len(training) == 1 + NUM_STEPS, "once to load, and for every step"
            assert len(generating) >= NUM_STEPS
            assert_apart([*training, *generating])
            _assert_made_in(generating, rollouts)
        # Generator and trainer compute the same probabilities, each in its own way (scenario L6).
        assert all(row["importance_ratio_mean"] == pytest.approx(1, abs=1e-4) for row in run.steps)
        assert all(row["mismatch_kl"] == pytest.approx(0, abs=1e-4) for row in run.steps)
        (checkpoint,) = (run.config.run_dir / "checkpoints").glob("step_*")
        ours = load_file(checkpoint / "model" / "model.safetensors")
        plain = load_file(tmp_path / "plain" / "model.safetensors")
        start = load_file(tmp_path / "model" / "model.safetensors")
        assert ours.keys() == plain.keys()
        assert all(torch.equal(ours[name], plain[name]) for name in plain)
        assert not all(torch.equal(plain[name], start[name]) for name in start)
