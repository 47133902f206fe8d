"""Generation by vLLM, in processes of its own below this one.

In: prompt groups and weights. Out: completions, each token with the logprob it was drawn at and
the version that drew it, as vLLM itself recorded it. Every completion is a request of its own, so
that a place is free as soon as one ends; the prompt of a group is read once and shared.

    state --> checked --> shared memory --> pause (keep) --> apply in the workers --> label --> resume
              while sequences are being decoded              the only time that they stand still
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import uuid
from typing import Any

from pipeline.config import Config
from pipeline.engines.shared_weights import SharedWeights
from pipeline.engines.vllm_adapters import AdapterShelf
from pipeline.engines.vllm_draws import Draws, Group, Sequence
from pipeline.engines.vllm_model import ServedModel
from pipeline.engines.vllm_options import engine_arguments, prepare_environment, require_installed
from pipeline.engines.vllm_outputs import Segment, TokenCounter, all_of, drafts_of
from pipeline.engines.vllm_requests import completion_text, token_limit
from pipeline.engines.vllm_start import close_connections, draw_one_token, start_engine
from pipeline.engines.vllm_updates import CacheMender, replace_weights, unless_dead
from pipeline.engines.vllm_worker import PATH as EXTENSION
from pipeline.errors import EngineError, EngineLostError, ModelError, NonFiniteError, WeightError
from pipeline.logs import get_logger
from pipeline.messages import Completion, PartialGroup, PromptGroup
from pipeline.models.loading import resolve_device, resolve_dtype
from pipeline.weights import WeightState

_ASK_AGAIN_S = 0.05

log = get_logger()


class VllmEngine:
    """A `GenerationEngine` around vLLM's AsyncLLM."""

    def __init__(self, config: Config) -> None:
        require_installed()
        self._config = config
        self._llm: Any = None
        self._model: ServedModel | None = None
        self._shared = SharedWeights()
        self._adapters: AdapterShelf | None = None
        self._version: int | None = None
        self._counter = TokenCounter()
        self._draws: Draws | None = None
        self._mender: CacheMender | None = None
        self._sequences: set[Sequence] = set()
        self._groups: set[Group] = set()
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
        self._model = model = await asyncio.to_thread(self._load)
        try:
            await draw_one_token(self._llm, model.end_ids[0], model_path=self._config.model.path)
        except ModelError:
            await self.close()
            raise
        if self._config.lora.rank and model.merger is None:
            self._adapters = AdapterShelf(self._llm, self._config.lora)

    async def generate(self, prompt: PromptGroup, partial: PartialGroup | None = None) -> tuple[Completion, ...]:
        """`prompt.sampling.group_size` completions. Raises Interrupted, EngineError, or EngineLostError: vLLM ended."""
        try:
            return await self._generate(prompt, partial)
        except NonFiniteError:
            if self._mender is not None:
                await self._mender.mend()
            raise

    async def interrupt(self) -> None:
        """End what is in flight with what there is of it; a request may be on its way, so it asks more than once."""
        self._is_interrupted = True
        while self._sequences and self._llm is not None:
            await self._abort_all(self._llm)
            await asyncio.sleep(_ASK_AGAIN_S)

    async def so_far(self) -> list[PartialGroup]:
        """What there is of the groups in flight, without a word to vLLM's processes."""
        found: list[PartialGroup] = []
        if (draws := self._draws) is None:
            return found
        for group in self._groups:
            with contextlib.suppress(EngineError):  # what is wrong with it is said when it ends
                found.append(group.left(draws))
        return found

    async def apply_weights(self, state: WeightState) -> float:
        """Check and copy while generation goes on, then replace between two steps; see the protocol.

        Cancelling it does not break off an update that has begun. Raises WeightError; where vLLM
        failed in the middle of one, nothing is served until another version has been applied. Raises
        EngineLostError where that is not possible any more.
        """
        return await asyncio.shield(self._update(state))

    async def sleep(self) -> None:
        """Leave the device; requests stay, and what they had read is read again. On a CPU nothing is freed."""
        await unless_dead(self._running().sleep(level=1, mode="keep"))

    async def wake_up(self) -> None:
        """Come back with the weights that were there."""
        await unless_dead(self._running().wake_up())

    async def close(self) -> None:
        """End vLLM's processes; what is still in flight ends with EngineError. Safe to call twice."""
        self._version = None
        if self._llm is not None:
            await self._abort_all(self._llm)
            if handler := getattr(self._llm, "output_handler", None):
                handler.cancel()  # or it reports the end of the other processes as a failure
            core = getattr(self._llm, "engine_core", None)
            await asyncio.to_thread(self._shut_down)
            close_connections(core)
            gc.collect()  # what is left of it for the end of the interpreter complains then
        self._shared.close()

    # Generating

    async def _generate(self, prompt: PromptGroup, partial: PartialGroup | None) -> tuple[Completion, ...]:
        model = self._check_serving()
        limit = token_limit(prompt, model.context)
        routers = model.routers if prompt.sampling.keep_routed_experts else None
        drafts = drafts_of(prompt, partial, limit, (routers.num_experts, routers.layers) if routers else None)
        sequences = [Sequence(draft=draft) for draft in drafts.values()]
        self._sequences.update(sequences)
        tasks = [
            asyncio.create_task(self._complete(model, prompt, index, limit, sequence))
            for index, sequence in zip(drafts, sequences, strict=True)
        ]
        group = Group(prompt, partial, dict(zip(drafts, sequences, strict=True)), tasks)
        self._groups.add(group)
        try:
            ended = await asyncio.gather(*tasks)
        finally:
            self._groups.discard(group)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sequences.difference_update(sequences)
        return all_of(prompt, partial, drafts, ended)

    async def _complete(
        self, model: ServedModel, prompt: PromptGroup, index: int, limit: int, sequence: Sequence
    ) -> Completion | None:
        """One completion, in as many requests as there were moves to another adapter; None: it was interrupted."""
        try:
            while not self._is_interrupted:
                segment = await self._segment(prompt, index, limit, sequence)
                sequence.draft.append(segment)
                if segment.reason is not None:
                    text = completion_text(model.tokenizer, sequence.draft.token_ids, segment.stop_text)
                    return sequence.draft.completion(segment.reason, text)
                if not (sequence.is_moving or self._is_interrupted):
                    raise EngineError(f"group {prompt.group_id}: vLLM gave up a sequence")
                self._check_serving()
            return None
        finally:
            self._sequences.discard(sequence)

    async def _segment(self, prompt: PromptGroup, index: int, limit: int, sequence: Sequence) -> Segment:
        assert self._draws is not None
        sequence.request_id = f"{prompt.group_id}-{index}-{uuid.uuid4().hex[:8]}"
        sequence.is_moving = False
        sequence.adapter = self._adapters.newest if self._adapters else None
        return await self._draws.segment(
            prompt,
            index,
            sequence.draft,
            limit=limit,
            request_id=sequence.request_id,
            version=self._version,
            adapter=sequence.adapter,
        )

    def _running(self) -> Any:
        """vLLM. Raises EngineError where it was not started, or was closed."""
        if self._llm is None:
            raise EngineError("the engine is not running")
        return self._llm

    def _check_serving(self) -> ServedModel:
        self._running()
        assert self._model is not None
        if self._version is None:
            raise EngineError("no verified weights are being served; apply_weights comes first")
        return self._model

    # Updating

    async def _update(self, state: WeightState) -> float:
        async with self._one_update:
            self._running()
            assert self._model is not None
            if self._version is not None and state.weight_version < self._version:
                raise WeightError(f"version {state.weight_version} is older than version {self._version} being served")
            # What an adapter leaves alone is in the engine once it has been given everything.
            has_everything = self._version is not None
            state = await asyncio.to_thread(self._model.checked, state, only_touched=has_everything)
            if self._adapters is not None:
                return await self._load_adapter(self._adapters, state)
            return await self._replace(state)

    async def _replace(self, state: WeightState) -> float:
        shared = await asyncio.to_thread(self._shared.write, state)
        llm = self._running()
        is_recomputed = self._config.generation.kv_on_update == "recompute"
        try:
            pause_s = await replace_weights(llm, shared, state.weight_version, is_recomputed=is_recomputed)
        except WeightError as error:
            await self._quarantine(state.weight_version, error)
            raise
        except EngineLostError:
            self._version = None
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
        llm, adapters = self._llm, self._adapters
        self._llm = self._adapters = self._draws = self._mender = None
        llm.shutdown()
        if adapters is not None:
            adapters.close()

    def _load(self) -> ServedModel:
        config = self._config
        prepare_environment(config.generation, os.environ)
        device = resolve_device(config.generation.device)
        dtype = resolve_dtype(config.generation.dtype, device)
        model = ServedModel.load(config, dtype=dtype)
        arguments = engine_arguments(
            config,
            dtype=str(dtype).removeprefix("torch."),
            context=model.context,
            is_cpu=device.type == "cpu",
        )
        self._llm, masks_from_logprobs = start_engine(arguments, self._counter)
        if arguments["worker_extension_cls"] == EXTENSION:
            self._mender = CacheMender(self._llm)
        self._draws = Draws(llm=self._llm, end_ids=model.end_ids, masks_from_logprobs=masks_from_logprobs)
        return model
