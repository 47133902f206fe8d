"""Generation by vLLM, in processes of its own below this one.

In: prompt groups and weights. Out: completions, each token with the logprob it was drawn at and
the version that drew it, as vLLM itself recorded it. Every completion is a request of its own, so
that a place is free as soon as one ends; the prompt of a group is read once and shared.

    state --> checked --> shared memory --> pause (keep) --> apply in the workers --> label --> resume
              while sequences are being decoded              the only time that they stand still
"""

from __future__ import annotations

import asyncio
import gc
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.engines.architecture import end_token_ids
from pipeline.engines.shared_weights import SharedWeights
from pipeline.engines.vllm_adapters import Adapter, AdapterShelf
from pipeline.engines.vllm_options import engine_arguments, prepare_environment, require_installed
from pipeline.engines.vllm_outputs import Draft, Segment, TokenCounter, all_of, drafts_of
from pipeline.engines.vllm_requests import completion_text, sampling_values, token_limit
from pipeline.engines.vllm_start import draw_one_token, start_engine
from pipeline.engines.vllm_updates import replace_weights
from pipeline.errors import EngineError, EngineLostError, ModelError, WeightError
from pipeline.logs import get_logger
from pipeline.messages import Completion, PartialGroup, PromptGroup
from pipeline.models.loading import context_length, load_skeleton, load_tokenizer, resolve_device, resolve_dtype
from pipeline.models.routing import Routers, find_routers
from pipeline.models.weights import stage_weights
from pipeline.weights import WeightKind, WeightState

if TYPE_CHECKING:
    import torch

_ASK_AGAIN_S = 0.05

log = get_logger()


@dataclass(eq=False, slots=True)
class _Sequence:
    """A completion in flight. request_id: of its present request. adapter: that it is decoded with."""

    draft: Draft
    request_id: str = ""
    adapter: Adapter | None = None
    is_moving: bool = False


class VllmEngine:
    """A `GenerationEngine` around vLLM's AsyncLLM."""

    def __init__(self, config: Config) -> None:
        require_installed()
        self._config = config
        self._llm: Any = None
        self._skeleton: torch.nn.Module | None = None
        self._tokenizer: Any = None
        self._context = 0
        self._end_ids: tuple[int, ...] = ()
        self._shared = SharedWeights()
        self._adapters: AdapterShelf | None = None
        self._version: int | None = None
        self._counter = TokenCounter()
        self._masks_from_logprobs = False
        self._routers: Routers | None = None
        self._sequences: set[_Sequence] = set()
        self._is_interrupted = False
        self._one_update = asyncio.Lock()

    @property
    def weight_version(self) -> int | None:
        """Version that is being served; None until the first `apply_weights`, and after one that broke off."""
        return self._version

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once."""
        return self._config.generation.max_num_seqs

    @property
    def num_unfinished_seqs(self) -> int:
        """Sequences accepted and not yet ended."""
        return len(self._sequences)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start."""
        return self._counter.num_tokens

    @property
    def num_adapters(self) -> int:
        """LoRA adapters that are loaded."""
        return self._adapters.num_live if self._adapters else 0

    async def start(self) -> None:
        """Load the model. Raises ModelError or ConfigError."""
        await asyncio.to_thread(self._load)
        try:
            await draw_one_token(self._llm, self._end_ids[0], model_path=self._config.model.path)
        except ModelError:
            await self.close()
            raise
        if self._config.lora.rank:
            self._adapters = AdapterShelf(self._llm, self._config.lora)

    async def generate(self, prompt: PromptGroup, partial: PartialGroup | None = None) -> tuple[Completion, ...]:
        """`prompt.sampling.group_size` completions. Raises Interrupted, EngineError, or EngineLostError: vLLM ended."""
        self._check_serving()
        limit = token_limit(prompt, self._context)
        drafts = drafts_of(prompt, partial, limit, self._routing(prompt))
        sequences = [_Sequence(draft=draft) for draft in drafts.values()]
        self._sequences.update(sequences)
        tasks = [
            asyncio.create_task(self._complete(prompt, index, limit, sequence))
            for index, sequence in zip(drafts, sequences, strict=True)
        ]
        try:
            ended = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sequences.difference_update(sequences)
        return all_of(prompt, partial, drafts, ended)

    async def interrupt(self) -> None:
        """End what is in flight with what there is of it; a request may be on its way, so it asks more than once."""
        self._is_interrupted = True
        while self._sequences:
            await self._abort_all(self._llm)
            await asyncio.sleep(_ASK_AGAIN_S)

    async def apply_weights(self, state: WeightState) -> float:
        """Check and copy while generation goes on, then replace between two steps; see the protocol.

        Cancelling it does not break off an update that has begun. Raises WeightError; where vLLM
        failed in the middle of one, nothing is served until another version has been applied.
        """
        return await asyncio.shield(self._update(state))

    async def close(self) -> None:
        """End vLLM's processes; what is still in flight ends with EngineError. Safe to call twice."""
        self._version = None
        if self._llm is not None:
            await self._abort_all(self._llm)
            if handler := getattr(self._llm, "output_handler", None):
                handler.cancel()  # or it reports the end of the other processes as a failure
            await asyncio.to_thread(self._shut_down)
            gc.collect()  # what is left of it for the end of the interpreter complains then
        self._shared.close()

    # Generating

    async def _complete(self, prompt: PromptGroup, index: int, limit: int, sequence: _Sequence) -> Completion | None:
        """One completion, in as many requests as there were moves to another adapter; None: it was interrupted."""
        try:
            while not self._is_interrupted:
                segment = await self._segment(prompt, index, limit, sequence)
                sequence.draft.append(segment)
                if segment.reason is not None:
                    text = completion_text(self._tokenizer, sequence.draft.token_ids, segment.stop_text)
                    return sequence.draft.completion(segment.reason, text)
                if not (sequence.is_moving or self._is_interrupted):
                    raise EngineError(f"group {prompt.group_id}: vLLM gave up a sequence")
                self._check_serving()
            return None
        finally:
            self._sequences.discard(sequence)

    def _routing(self, prompt: PromptGroup) -> tuple[int, tuple[int, ...]] | None:
        routers = self._routers if prompt.sampling.keep_routed_experts else None
        return (routers.num_experts, routers.layers) if routers else None

    async def _segment(self, prompt: PromptGroup, index: int, limit: int, sequence: _Sequence) -> Segment:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        sequence.request_id = f"{prompt.group_id}-{index}-{uuid.uuid4().hex[:8]}"
        sequence.is_moving = False
        adapter = sequence.adapter = self._adapters.newest if self._adapters else None
        version = self._version
        request = self._llm.generate(
            # The salt keeps what an older version read out of the cache from being used for a newer one.
            tokens_input([*prompt.prompt_token_ids.tolist(), *sequence.draft.token_ids], cache_salt=str(version)),
            self._sampling_params(prompt, index, sequence.draft, limit),
            sequence.request_id,
            lora_request=adapter.request if adapter else None,
        )
        try:
            outputs = [output async for output in request]  # one: the final
        except EngineDeadError as error:
            raise EngineLostError(f"vLLM has ended: {error}") from error
        except (EngineGenerateError, ValueError) as error:
            raise EngineError(f"group {prompt.group_id}: vLLM failed: {error.__cause__ or error}") from error
        return Segment.of(
            outputs[-1].outputs[0],
            adapter_version=adapter.version if adapter else None,
            has_all_logprobs=self._masks_from_logprobs and prompt.sampling.keep_sampling_mask,
        )

    def _sampling_params(self, prompt: PromptGroup, index: int, draft: Draft, limit: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        so_far = draft.num_tokens
        values = sampling_values(prompt, index, so_far=so_far, max_tokens=limit - so_far, end_ids=self._end_ids)
        if self._masks_from_logprobs and prompt.sampling.keep_sampling_mask:
            values["logprobs"] = -1
        return SamplingParams(
            **values,
            flat_logprobs=True,
            routed_experts_prompt_start=draft.num_routed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _check_serving(self) -> None:
        if self._llm is None:
            raise EngineError("the engine is not running")
        if self._version is None:
            raise EngineError("no verified weights are being served; apply_weights comes first")

    # Updating

    async def _update(self, state: WeightState) -> float:
        async with self._one_update:
            if self._llm is None or self._skeleton is None:
                raise EngineError("the engine is not running")
            if self._version is not None and state.weight_version < self._version:
                raise WeightError(f"version {state.weight_version} is older than version {self._version} being served")
            await asyncio.to_thread(stage_weights, self._skeleton, state)
            if state.kind is WeightKind.ADAPTER:
                assert self._adapters is not None
                return await self._load_adapter(self._adapters, state)
            return await self._replace_all(state)

    async def _replace_all(self, state: WeightState) -> float:
        shared = await asyncio.to_thread(self._shared.write, state)
        is_recomputed = self._config.generation.kv_on_update == "recompute"
        try:
            pause_s = await replace_weights(self._llm, shared, state.weight_version, is_recomputed=is_recomputed)
        except WeightError as error:
            await self._quarantine(state.weight_version, error)
            raise
        self._version = state.weight_version
        return pause_s

    async def _quarantine(self, weight_version: int, error: Exception) -> None:
        """Nobody knows which weights there are now, so nothing is drawn from them until others have been applied."""
        log.error("engine_quarantined", weight_version=weight_version, reason=str(error))
        self._version = None
        await self._abort_all(self._llm)

    async def _abort_all(self, llm: Any) -> None:
        await llm.abort([sequence.request_id for sequence in self._sequences if sequence.request_id])

    async def _load_adapter(self, adapters: AdapterShelf, state: WeightState) -> float:
        """Make room, load, and take along what would otherwise be decoded with weights that are too old."""
        oldest_allowed = state.weight_version - self._config.staleness.max_staleness
        pause_s = await adapters.load(state)
        self._version = state.weight_version
        await self._move(below=max(oldest_allowed, adapters.oldest_to_keep()))
        await adapters.unload_unused({sequence.adapter for sequence in self._sequences if sequence.adapter})
        return pause_s

    async def _move(self, *, below: int) -> None:
        """Sequences on an adapter older than `below` go on with the newest, from the tokens that they have."""
        moving = [item for item in self._sequences if item.adapter is not None and item.adapter.version < below]
        for sequence in moving:
            sequence.is_moving = True
            sequence.adapter = None
        if moving:
            await self._llm.abort([sequence.request_id for sequence in moving])

    # Starting

    def _shut_down(self) -> None:
        llm, self._llm, self._adapters = self._llm, None, None
        llm.shutdown()

    def _load(self) -> None:
        config = self._config
        prepare_environment(config.generation, os.environ)
        device = resolve_device(config.generation.device)
        self._tokenizer = load_tokenizer(config.model)
        self._skeleton = load_skeleton(config.model, config.lora)
        self._routers = find_routers(self._skeleton) if config.generation.replay_routing else None
        self._end_ids = end_token_ids(self._skeleton, self._tokenizer)
        self._context = context_length(config.model, self._skeleton.config)  # type: ignore[arg-type]
        arguments = engine_arguments(
            config,
            dtype=str(resolve_dtype(config.generation.dtype, device)).removeprefix("torch."),
            context=self._context,
            is_cpu=device.type == "cpu",
        )
        self._llm, self._masks_from_logprobs = start_engine(arguments, self._counter)
