"""What a generator has of the model that vLLM serves: all but its weights.

In: the settings of a run. Out: the tokenizer, the ends of a completion, the context; and for weights
that arrive the answer whether they fit, in the form in which vLLM is to load them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config import Config
from pipeline.engines.architecture import end_token_ids
from pipeline.models.loading import context_length, load_skeleton, load_tokenizer
from pipeline.models.merging import LoraMerger
from pipeline.models.routing import Routers, find_routers
from pipeline.models.weights import stage_weights
from pipeline.weights import WeightState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """tokenizer: of Hugging Face. end_ids: tokens that end a completion. context: prompt plus completion, in tokens.

    routers: of a mixture of experts whose choices are recorded. merger: where adapters become part of the weights.
    """

    tokenizer: Any
    end_ids: tuple[int, ...]
    context: int
    routers: Routers | None
    merger: LoraMerger | None
    _skeleton: torch.nn.Module

    @classmethod
    def load(cls, config: Config, *, dtype: torch.dtype | None = None) -> ServedModel:
        """dtype: that is served; None leaves it to vLLM. Raises ModelError, ConfigError."""
        tokenizer = load_tokenizer(config.model)
        skeleton = load_skeleton(config.model, config.lora)
        return cls(
            tokenizer=tokenizer,
            end_ids=end_token_ids(skeleton, tokenizer),
            context=context_length(config.model, skeleton.config),  # type: ignore[arg-type]
            routers=find_routers(skeleton) if config.generation.replay_routing else None,
            merger=LoraMerger(config.model, config.lora, dtype=dtype) if config.merges_lora else None,
            _skeleton=skeleton,
        )

    def checked(self, state: WeightState, *, only_touched: bool = False) -> WeightState:
        """`state`, or the full weights that an adapter makes of those below it. Raises WeightError: it does not fit.

        only_touched: as in `LoraMerger.merge`, for an engine that was given everything before.
        """
        if self.merger is not None:
            return self.merger.merge(state, only_touched=only_touched)
        stage_weights(self._skeleton, state)
        return state
