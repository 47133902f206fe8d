"""From `generation.engine` to an engine. Only the engine that is asked for is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.engines import GenerationEngine

if TYPE_CHECKING:
    from pipeline.weights.address_watch import Resolve


def create_engine(config: Config, *, resolve: Resolve | None = None) -> GenerationEngine:
    """The engine of these settings, not started. resolve: where weights are published. Raises ConfigError."""
    generation, seed = config.generation, config.run.seed
    if generation.engine == "transformers":
        from pipeline.engines.transformers import TransformersEngine

        return TransformersEngine(config.model, config.lora, generation, seed=seed)
    if generation.engine == "scripted":
        from pipeline.engines.scripted import ScriptedEngine

        return ScriptedEngine(generation, seed=seed, max_context=config.model.max_context)
    if generation.engine == "openai":
        from pipeline.engines.openai import OpenAiEngine

        return OpenAiEngine(config, resolve=resolve)
    from pipeline.engines.vllm import VllmEngine

    return VllmEngine(config)
