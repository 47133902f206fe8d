"""The policy that a configuration names, on the devices of all ranks.

In: settings and the ranks. Out: a policy ready to be trained. Rank 0 alone reads the weights; the others
have the model without them until rank 0 spreads them, so that a machine holds them once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from transformers import PreTrainedModel

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.models.loading import load_model, load_untrained, resolve_dtype
from pipeline.models.routing import RoutingReplay
from pipeline.packing import Layout
from pipeline.policy import CausalModel, Policy, Run, directly, proven_layout, quiet_dropout
from pipeline.policy.compiling import compile_layers, require_compiler
from pipeline.ranks.world import World


def build_policy(config: Config, world: World, *, on_loaded: Callable[[], None] = lambda: None) -> Policy:
    """Load the model and what belongs to it. on_loaded: called on rank 0 before the others are needed.

    Raises ModelError, ConfigError.
    """
    trainer = config.trainer
    if trainer.compile:
        require_compiler(world.device)
    if config.lora.quantization != "none" and not world.is_alone:
        raise ConfigError(
            f"lora.quantization = {config.lora.quantization!r} with {world.size} ranks: weights in 4 bits are not "
            "spread; start the trainer on one, or set lora.quantization = 'none'"
        )
    dtype = resolve_dtype(trainer.dtype, world.device)
    autocast = dtype if dtype is not torch.float32 else None
    model = _load(config, world, dtype)
    needs_copy = config.algorithm.kl_coef > 0 and not config.lora.rank
    reference = frozen_copy(model) if needs_copy else None
    replay = RoutingReplay(model) if config.generation.replay_routing else None
    if trainer.gradient_checkpointing:
        _enable_checkpointing(model, replay)
    layout = Layout(trainer.micro_batch_layout)
    if world.leads and not world.is_alone:
        # Of all weights, in their own precision, before they are spread.
        quiet_dropout(model)
        layout = proven_layout(model, None, layout)
    on_loaded()
    layout = Layout(world.share(str(layout)))
    is_sharded = trainer.parallel == "fsdp"
    run: Run = directly if world.is_alone else _spread(model, world, autocast, is_sharded=is_sharded)
    run_reference: Run = directly
    if reference is not None and not world.is_alone:
        run_reference = _spread(reference, world, autocast, is_sharded=is_sharded)
    policy = Policy(
        model,
        logprob_chunk_tokens=trainer.logprob_chunk_tokens,
        autocast=autocast,
        float32_head=trainer.head_dtype == "float32",
        reference=reference,
        replay=replay,
        layout=layout,
        is_proven=not world.is_alone,
        run=run,
        run_reference=run_reference,
    )
    for each in (model, reference) if trainer.compile else ():
        if each is not None:
            compile_layers(each)
    return policy


def _load(config: Config, world: World, dtype: torch.dtype) -> CausalModel:
    """Frozen weights below an adapter need no float32 copy; all that is trained is float32."""
    dtype = dtype if config.lora.rank else torch.float32
    if not world.leads:
        return cast(CausalModel, load_untrained(config.model, config.lora, dtype=dtype))
    device = world.device if world.is_alone else torch.device("cpu")
    model = load_model(config.model, config.lora, device=device, dtype=dtype, seed=config.run.seed, trainable=True)
    return cast(CausalModel, model)


def _spread(model: CausalModel, world: World, autocast: torch.dtype | None, *, is_sharded: bool) -> Run:
    """Put the model on all ranks with the weights that rank 0 has; returns how a pass through it is to be made."""
    from pipeline.ranks.sharding import agree_on_tensors, copies_of, replicate, shard, spread_over

    agree_on_tensors(model, world)
    originals = copies_of(model) if world.leads else {}
    run: Run = directly
    if is_sharded:
        run = shard(model, world, dtype=autocast)
    else:
        replicate(model, world)
    spread_over(model, world, originals)
    return run


def _enable_checkpointing(model: CausalModel, replay: RoutingReplay | None) -> None:
    settings: dict[str, object] = {"use_reentrant": False}
    if replay is not None:
        settings["context_fn"] = replay.checkpoint_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def frozen_copy(model: CausalModel) -> PreTrainedModel:
    """The model as it is now, for the KL term."""
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    assert isinstance(frozen, PreTrainedModel)
    return frozen
