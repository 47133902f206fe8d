"""One run of the demo's task in this process, in which every token is as old as was asked for.

In: a start, a correction or preset, a lag and a seed. Out: rewards against completions trained on. Step t trains on
what the weights of step t - lag generated; until there are so many, on what the first weights generated.
Engine, rewards and learner are those of any run; queues and processes are left out, so that the same
arguments give the same numbers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config import Config
from pipeline.config.presets import PRESETS
from pipeline.demo.cold_start import exact_match, sequences
from pipeline.demo.prepare import Prepared
from pipeline.demo.settings import demo_config
from pipeline.demo.task import make_words
from pipeline.engines import GenerationEngine
from pipeline.engines.registry import create_engine
from pipeline.feeder import stamped
from pipeline.filters import is_zero_variance
from pipeline.learner.policy import PolicyLearner
from pipeline.messages import Completion, Outcome, PromptGroup, RewardResult, RolloutGroup, Score, ScoredGroup
from pipeline.rewards.functions import RewardFunction, load_function
from pipeline.run.data import load_run_data
from pipeline.weights import HostTensor, WeightState

# none leaves old tokens as they are; clip is PPO's update against the policy that sampled them.
CORRECTIONS: Mapping[str, Mapping[str, str]] = {
    "none": {"preset": "grpo", "correction": "none", "proximal": "recomputed"},
    "clip": {"preset": "grpo", "correction": "none", "proximal": "generator"},
    "tis": {"preset": "grpo"},
    "decoupled_ppo": {"preset": "decoupled_ppo"},
}
# What may be named besides: a preset as it stands. Without a teacher one learns nothing.
OTHER_PRESETS = [name for name, preset in PRESETS.items() if name not in CORRECTIONS and not preset.distillation]
HELD_OUT_SEED = -1
_DESCRIBED = ("mismatch_kl", "effective_sample_size", "clip_fraction", "truncated_fraction", "staleness_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that decides the numbers of a run.

    correction: of CORRECTIONS or OTHER_PRESETS. lag: age of every token in steps, once so many steps are done.
    evaluate_every: steps. num_held_out: words to evaluate on. schedule: of the learning rate, as `trainer.schedule`.
    """

    correction: str
    lag: int
    seed: int
    learning_rate: float
    groups_per_step: int
    steps: int
    evaluate_every: int
    num_held_out: int
    schedule: str = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """samples: completions trained on before each evaluation. held_out: share of greedy answers that are right.

    training: mean reward of the completions trained on since the evaluation before. described: means over
    the steps whose tokens have the lag that was asked for.
    """

    samples: list[int]
    held_out: list[float]
    training: list[float]
    described: dict[str, float]


def run_case(case: Case, prepared: Prepared) -> Curve:
    """The whole run. prepared: the start, and the words of the case's seed."""
    return asyncio.run(_run(_config(case, prepared), case, held_out_rows(case.seed, case.num_held_out)))


def held_out_rows(seed: int, number: int) -> torch.Tensor:
    """The demo's held-out words and more of their kind; none that a run of this seed trains on."""
    words = make_words(seed=seed)
    more = make_words(seed=HELD_OUT_SEED, num_training=max(number, len(words.held_out))).training
    trained = frozenset(words.training)
    return sequences([*words.held_out, *(word for word in more if word not in trained)][:number])


async def _run(config: Config, case: Case, rows: torch.Tensor) -> Curve:
    learner, engine = PolicyLearner.create(config), create_engine(config)
    source, reward = load_run_data(config).source, load_function("exact_match", {})
    is_dynamic = config.algorithm.resolved.drop_zero_variance is True
    history: deque[WeightState] = deque(maxlen=case.lag + 1)
    curve = Curve(samples=[0], held_out=[_accuracy(learner, rows)], training=[], described={})
    rewards: list[float] = []
    settled: list[Mapping[str, float]] = []
    await engine.start()
    try:
        for step in range(case.steps):
            history.append(_copied(learner.export_weights(step)))
            await engine.apply_weights(history[0])
            groups: list[ScoredGroup] = []
            while len(groups) < case.groups_per_step:
                wanted = range(case.groups_per_step - len(groups))
                prompts = [source.next_group(step, history[0].weight_version) for _ in wanted]
                fresh = await _groups(engine, reward, [prompt for prompt in prompts if prompt is not None])
                groups += [group for group in fresh if not (is_dynamic and is_zero_variance(group))]
            metrics = learner.step(groups, trainer_version=step)
            rewards.append(metrics["reward_mean"])
            if step >= case.lag:
                settled.append(metrics)
            if (step + 1) % case.evaluate_every == 0 or step + 1 == case.steps:
                curve.samples.append((step + 1) * case.groups_per_step * config.generation.group_size)
                curve.held_out.append(_accuracy(learner, rows))
                curve.training.append(round(float(np.mean(rewards)), 4))
                rewards.clear()
    finally:
        await engine.close()
    curve.described.update(_means(settled))
    return curve


async def _groups(
    engine: GenerationEngine, reward: RewardFunction, prompts: Sequence[PromptGroup]
) -> list[ScoredGroup]:
    fed = [stamped(prompt, version=prompt.fed_version, min_version=prompt.min_version) for prompt in prompts]
    completed = await asyncio.gather(*(engine.generate(prompt) for prompt in fed))
    return [_scored(reward, prompt, completions) for prompt, completions in zip(fed, completed, strict=True)]


def _scored(reward: RewardFunction, prompt: PromptGroup, completions: tuple[Completion, ...]) -> ScoredGroup:
    number = len(completions)
    columns: dict[str, list[Any]] = {name: [value] * number for name, value in prompt.columns.items()}
    values = reward([prompt.prompt] * number, [completion.text for completion in completions], **columns)
    parts = [RewardResult(name="exact_match", value=value, outcome=Outcome.OK) for value in values]
    return ScoredGroup(
        rollout=RolloutGroup(prompt=prompt, completions=completions, generator="staleness"),
        scores=tuple(Score(reward=part.value, parts=(part,)) for part in parts),
        scorer="staleness",
    )


def _accuracy(learner: PolicyLearner, rows: torch.Tensor) -> float:
    model: Any = learner.policy.model
    return round(exact_match(model, rows), 4)


def _copied(state: WeightState) -> WeightState:
    """Exported weights may share memory with the model, which goes on changing."""
    tensors = {
        name: HostTensor(dtype=tensor.dtype, shape=tensor.shape, data=memoryview(bytearray(tensor.data)))
        for name, tensor in state.tensors.items()
    }
    return WeightState(weight_version=state.weight_version, kind=state.kind, tensors=tensors)


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(float(np.mean([row.get(name, 0.0) for row in rows])), 5) for name in _DESCRIBED if rows}


def _config(case: Case, prepared: Prepared) -> Config:
    config = demo_config(
        prepared, run_dir=Path("runs"), name="staleness", seed=case.seed, steps=case.steps, max_staleness=case.lag
    )
    chosen = CORRECTIONS.get(case.correction, {"preset": case.correction})
    algorithm = config.algorithm.model_copy(update=dict(chosen))
    trainer = {
        "learning_rate": case.learning_rate,
        "schedule": case.schedule,
        "groups_per_step": case.groups_per_step,
        "num_threads": 1,
    }
    generation = {"num_threads": 1, "max_num_seqs": case.groups_per_step * config.generation.group_size}
    return config.model_copy(
        update={
            "algorithm": algorithm,
            "trainer": config.trainer.model_copy(update=trainer),
            "generation": config.generation.model_copy(update=generation),
        }
    )
