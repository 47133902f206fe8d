"""The learner with a model: weigh every token, accumulate the gradient, step.

In: the scored groups of one step. Out: a policy that is one optimiser step further, and metrics.
Neither the order of the groups nor their split into micro-batches matters to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor

from pipeline.algorithms import Objective, TokenInputs, evaluate, resolve_algorithm
from pipeline.batching import MicroBatch, Sample, arrange, make_samples
from pipeline.config import AlgorithmSettings, Config, ModelSettings, StalenessSettings, TrainerSettings
from pipeline.config.advice import advice
from pipeline.learner.ages import AgeTally
from pipeline.learner.building import build_policy
from pipeline.learner.optimizer import Optimizer
from pipeline.learner.plan import Plan, make_plan, reward_weights
from pipeline.learner.report import describe_groups, in_feeding_order
from pipeline.learner.snapshot import PolicySnapshot, weights_to_save
from pipeline.learner.survey import survey
from pipeline.learner.tally import TokenTally, describe_tokens
from pipeline.learner.teaching import count_untaught, what_teachers_say
from pipeline.messages import ScoredGroup
from pipeline.models.loading import resolve_device, resolve_dtype
from pipeline.models.weights import export_weights, num_weight_bytes, weight_kind
from pipeline.packing import describe_layout
from pipeline.policy import Policy
from pipeline.ranks.dealing import Deal, deal, shortest
from pipeline.ranks.world import World
from pipeline.staleness import assess
from pipeline.weights import WeightState

_log = structlog.get_logger("pipeline.learner")


class PolicyLearner:
    """Trains a policy on the groups it is given. Of a trainer on several ranks each has one, and all do the same."""

    def __init__(
        self,
        policy: Policy,
        *,
        algorithm: AlgorithmSettings,
        trainer: TrainerSettings,
        staleness: StalenessSettings,
        model: ModelSettings | None = None,
        wire_dtype: torch.dtype | None = None,
        reward_weights: Mapping[str, float] | None = None,
        world: World | None = None,
    ) -> None:
        """model: where the tokenizer is that `save_model` adds. wire_dtype: precision of exported and
        saved weights; None keeps that of the master weights. reward_weights: of reward functions by name.
        world: the ranks that share the work.

        Raises ConfigError for an unknown algorithm or an impossible schedule.
        """
        self.policy = policy
        self._algorithm = resolve_algorithm(algorithm)
        self._settings = self._algorithm.settings
        self._reward_weights = dict(reward_weights or {})
        self._staleness = staleness
        self._micro_batch_tokens = trainer.micro_batch_tokens
        self._world = world or World.alone(policy.device)
        self.is_sharded = not self._world.is_alone and trainer.parallel == "fsdp"
        self._optimizer = Optimizer(policy.model, trainer, self._world)
        self._model_settings = model
        self._wire_dtype = wire_dtype
        self._device = policy.device
        self._warned: set[str] = set()

    @classmethod
    def create(
        cls, config: Config, world: World | None = None, *, on_loaded: Callable[[], None] = lambda: None
    ) -> PolicyLearner:
        """Load the model that `config` names. Raises ModelError, ConfigError.

        on_loaded: called on rank 0 when nothing that the user can mend is left to go wrong there, and
        before the other ranks are needed.
        """
        resolve_algorithm(config.algorithm)
        trainer = config.trainer
        world = world or World.alone(resolve_device(trainer.device, setting="trainer.device"))
        if world.leads:
            for text in advice(config.algorithm, config.generation, config.staleness):
                _log.warning("algorithm_advice", advice=text)
        if trainer.num_threads:
            torch.set_num_threads(trainer.num_threads)
        is_narrow = resolve_dtype(trainer.dtype, world.device) is not torch.float32
        return cls(
            build_policy(config, world, on_loaded=on_loaded),
            algorithm=config.algorithm,
            trainer=trainer,
            staleness=config.staleness,
            model=config.model,
            wire_dtype=torch.bfloat16 if is_narrow or config.generation.dtype == "bfloat16" else None,
            reward_weights=reward_weights(config.scoring.rewards)
            | {judge.title: judge.weight for judge in config.scoring.judges},
            world=world,
        )

    def step(self, groups: Sequence[ScoredGroup], *, trainer_version: int) -> dict[str, float]:
        """One optimiser step on `groups`; returns metrics. See `pipeline.learner.Learner`."""
        self._move(self._device)
        loss, metrics = self.accumulate(groups, trainer_version=trainer_version)
        num_tokens = metrics["trained_tokens"]
        update = self._optimizer.step(loss) if num_tokens else self._optimizer.skip()
        if not update.is_applied and self._world.leads:
            _log.warning("step_skipped", loss=float(loss), grad_norm=update.grad_norm, tokens=num_tokens)
        return metrics | {
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "skipped_steps": float(not update.is_applied),
        }

    def accumulate(self, groups: Sequence[ScoredGroup], *, trainer_version: int) -> tuple[Tensor, dict[str, float]]:
        """Add the gradient of the loss on `groups` to the parameters; returns the loss and metrics.

        What normalises the loss is counted over all groups before the first micro-batch.
        """
        ordered = in_feeding_order(groups)
        assessments = [assess(group, trainer_version, self._staleness) for group in ordered]
        samples = make_samples(ordered, assessments)
        num_unreplayed, num_unrouted = self._count_missing(samples)
        plan = self._plan(samples)
        tally, by_age = TokenTally(self.policy.device), AgeTally(self.policy.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        self._optimizer.begin()
        dealt = self._deal(samples)
        for rows in dealt.micro_batches:
            # A rank that has nothing to do computes something that counts for nothing: others wait for it.
            chosen, counts = rows or [shortest(samples)], bool(rows)
            advantages, factors = [plan.advantages[row] for row in chosen], plan.factors[chosen] * counts
            batch = arrange([samples[row] for row in chosen], advantages, factors, self.policy.layout)
            loss += self._backward(batch.to(self.policy.device), plan.limit, tally, by_age, counts=counts)
        self._world.add(loss)
        tally.join(self._world)
        by_age.join(self._world)
        num_unusable = sum(sample.num_tokens for sample in samples) - tally.num_tokens
        described = describe_groups(ordered, assessments) | plan.describe() | describe_tokens(tally)
        described |= describe_layout(samples, dealt.of_all_ranks, self.policy.layout)
        return loss, described | by_age.describe() | {
            "loss": float(loss),
            "trained_tokens": float(tally.num_tokens),
            "nonfinite_tokens": float(sum(sample.num_nonfinite for sample in samples) + num_unusable),
            "unreplayed_tokens": float(num_unreplayed),
            "unrouted_tokens": float(num_unrouted),
            "untaught_tokens": float(count_untaught(self._settings, samples, self._warn_once)),
            **({} if self._world.is_alone else {"rank_balance": dealt.balance}),
        }

    def _deal(self, samples: Sequence[Sample]) -> Deal:
        return deal(
            samples,
            self._micro_batch_tokens,
            self.policy.layout,
            rank=self._world.rank,
            size=self._world.size,
        )

    def _plan(self, samples: Sequence[Sample]) -> Plan:
        """What is decided over the whole step before its first micro-batch."""
        seen = None
        if self._settings.needs_survey:
            batches = self._deal(samples).micro_batches
            seen = survey(self.policy, samples, batches, with_reference=self._settings.kl_coef > 0, world=self._world)
        return make_plan(self._algorithm, samples, seen, weights=self._reward_weights)

    def leave_device(self) -> None:
        """Move model, reference and moments to host memory; the next step takes the device again."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        if self.policy.device != device:
            self.policy.move(device)
            self._optimizer.move(device)

    @property
    def num_weight_bytes(self) -> int:
        """Size of the trained weights (or of the adapter) as they are sent."""
        return num_weight_bytes(self.policy.model, dtype=self._wire_dtype)

    def export_weights(self, weight_version: int) -> WeightState:
        """The trained weights (or the adapter) in host memory; where they are there already, no copy.

        On other ranks than 0 an object without tensors.
        """
        kind = weight_kind(self.policy.model)
        tensors = export_weights(self.policy.model, kind=kind, dtype=self._wire_dtype, is_kept=self._world.leads)
        return WeightState(weight_version=weight_version, kind=kind, tensors=tensors)

    def state_dict(self) -> dict[str, object]:
        """Trained weights in full precision, optimiser, step and random state; empty on other ranks than 0."""
        return self._optimizer.state_dict()

    def check_state(self, state: Mapping[str, object]) -> None:
        """Raises ModelError where a state is of another model."""
        self._optimizer.check(state)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` gave, which rank 0 has. Raises ModelError where it is of another model."""
        self._optimizer.load_state_dict(state)

    def snapshot(self) -> PolicySnapshot:
        """What a checkpoint holds, in host memory: the only part of writing one that a step has to wait for."""
        return self.model_snapshot(self.state_dict())

    def model_snapshot(self, state: dict[str, object] | None = None) -> PolicySnapshot:
        """The policy alone, in host memory."""
        return PolicySnapshot(
            model=self.policy.model,
            weights=weights_to_save(self.policy.model, self._wire_dtype, is_kept=self._world.leads),
            state=state or {},
            model_settings=self._model_settings,
        )

    def save_model(self, directory: Path) -> None:
        """A Hugging Face directory with the weights (or the adapter) and the tokenizer."""
        self.model_snapshot().save_model(directory)

    def _backward(
        self, batch: MicroBatch, limit: Tensor | None, tally: TokenTally, by_age: AgeTally, *, counts: bool
    ) -> Tensor:
        """Add the gradient of one micro-batch; returns its part of the loss, detached."""
        # Before the pass whose gradient is wanted: weights that are gathered for one are let go after it.
        reference = self.policy.reference_logprobs(batch) if self._settings.kl_coef > 0 else None
        output = self.policy.evaluate(batch, with_top=self._settings.jsd_coef > 0)
        dtype = output.logprobs.dtype
        objective: Objective = evaluate(
            self._algorithm,
            TokenInputs(
                trainer_logprobs=output.logprobs,
                generator_logprobs=batch.generator_logprobs.to(dtype),
                advantages=batch.advantages.to(dtype),
                mask=batch.mask,
                ages=batch.ages,
                ref_logprobs=reference,
                limit=limit.to(batch.ages.device) if limit is not None else None,
                **what_teachers_say(self._settings, batch, output),
            ),
        )
        loss = (objective.losses * batch.factors.to(dtype)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        values = dict(objective.stats) | {"entropy": output.entropies}
        mask = objective.mask & counts
        tally.add(values, mask, largest=("importance_ratio",))
        by_age.add(values, objective.log_ratios, batch.ages, mask)
        return loss.detach()

    def _count_missing(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Tokens without the sampling mask, and without the routed experts, that they should have; warns once."""
        num_unreplayed = sum(sample.num_unreplayed for sample in samples)
        if num_unreplayed:
            self._warn_once(
                "sampling_mask_missing",
                tokens=num_unreplayed,
                consequence="top-p/top-k cut the generator's distribution: importance ratios are off by what was cut",
                way_out="set generation.replay_sampling_mask = true, or generation.top_p = 1 and top_k = 0",
            )
        if not self.policy.replays_routing:
            return num_unreplayed, 0
        num_unrouted = sum(sample.num_tokens for sample in samples if sample.completion.routed_experts is None)
        if num_unrouted:
            self._warn_once(
                "routed_experts_missing",
                tokens=num_unrouted,
                consequence="the trainer's routers choose for these tokens, so importance ratios may be off",
                way_out="run generators and trainer with the same generation.replay_routing",
            )
        return num_unreplayed, num_unrouted

    def _warn_once(self, event: str, **details: object) -> None:
        if event not in self._warned and self._world.leads:
            self._warned.add(event)
            _log.warning(event, **details)
