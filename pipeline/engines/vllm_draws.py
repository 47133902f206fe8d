"""One request to the vLLM of this process, and what it draws; and the group that it is for.

In: a prompt and what there is of a completion. Out: the segment that vLLM puts behind it, until the
completion ends or the request is broken off.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pipeline.engines.vllm_adapters import Adapter
from pipeline.engines.vllm_outputs import Draft, Segment, left_of
from pipeline.engines.vllm_requests import sampling_values
from pipeline.errors import EngineError, EngineLostError
from pipeline.messages import Completion, PartialGroup, PromptGroup


@dataclass(eq=False, slots=True)
class Sequence:
    """A completion in flight. request_id: of its present request. adapter: that it is decoded with."""

    draft: Draft
    request_id: str = ""
    adapter: Adapter | None = None
    is_moving: bool = False


@dataclass(eq=False, slots=True)
class Group:
    """A group in flight. sequences, tasks: of its completions that had not been finished elsewhere."""

    prompt: PromptGroup
    partial: PartialGroup | None
    sequences: dict[int, Sequence]
    tasks: list[asyncio.Task[Completion | None]]

    def left(self, draws: Draws) -> PartialGroup:
        """What there is of it at this moment. Raises EngineError."""
        drafts, ended = {}, []
        for (index, sequence), task in zip(self.sequences.items(), self.tasks, strict=True):
            is_ended = task.done() and not task.cancelled() and task.exception() is None
            ended.append(task.result() if is_ended else None)
            segment = None if is_ended else draws.so_far(self.prompt, sequence.request_id, sequence.adapter)
            drafts[index] = sequence.draft.with_(segment)
        return left_of(self.prompt, self.partial, drafts, ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Where to draw. end_ids: tokens that end a completion. masks_from_logprobs: vLLM keeps no sampling masks."""

    llm: Any
    end_ids: tuple[int, ...]
    masks_from_logprobs: bool

    async def segment(
        self,
        prompt: PromptGroup,
        index: int,
        draft: Draft,
        *,
        limit: int,
        request_id: str,
        version: int | None,
        adapter: Adapter | None,
    ) -> Segment:
        """What is drawn behind `draft`, of at most `limit` tokens. Raises EngineError, EngineLostError: vLLM ended.

        version: of the weights that read what comes before.
        """
        from vllm.exceptions import VLLMError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            request = self.llm.generate(
                # The salt keeps what an older version read out of the cache from being used for a newer one.
                tokens_input([*prompt.prompt_token_ids.tolist(), *draft.token_ids], cache_salt=str(version)),
                self._sampling_params(prompt, index, draft, limit),
                request_id,
                lora_request=adapter.request if adapter else None,
            )
            outputs = [output async for output in request]  # one: the final
        except EngineDeadError as error:
            raise EngineLostError(f"vLLM has ended: {error}") from error
        except (VLLMError, ValueError) as error:  # this request's alone, such as a token that the model does not have
            raise EngineError(f"group {prompt.group_id}: vLLM failed: {error.__cause__ or error}") from error
        return Segment.of(
            outputs[-1].outputs[0],
            adapter_version=adapter.version if adapter else None,
            has_all_logprobs=self._reads_mask(prompt),
        )

    def so_far(self, prompt: PromptGroup, request_id: str, adapter: Adapter | None) -> Segment | None:
        """What a request has drawn until now, as vLLM's front end holds it; None where it holds nothing of it.

        To look costs the engine nothing, where a stream of outputs would cost both sides for every step.
        Versions are said of final outputs only, so they are taken from the same place.
        """
        processor = self.llm.output_processor
        own_ids = processor.external_req_ids.get(request_id) or [request_id]
        state = processor.request_states.get(own_ids[0])
        if state is None or not state.detokenizer.output_token_ids:
            return None
        masks = [kept for chunk in state.sampling_mask_chunks for kept in chunk.to_nested_list()]
        output = SimpleNamespace(
            token_ids=list(state.detokenizer.output_token_ids),
            logprobs=state.logprobs_processor.logprobs,
            weight_versions=state._weight_version_spans(),
            sampling_mask=SimpleNamespace(token_ids=masks) if masks else None,
            finish_reason="abort",
            stop_reason=None,
            routed_experts=None,
        )
        version = adapter.version if adapter else None
        return Segment.of(output, adapter_version=version, has_all_logprobs=self._reads_mask(prompt))

    def _sampling_params(self, prompt: PromptGroup, index: int, draft: Draft, limit: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        so_far = draft.num_tokens
        values = sampling_values(prompt, index, so_far=so_far, max_tokens=limit - so_far, end_ids=self.end_ids)
        if self._reads_mask(prompt):
            values["logprobs"] = -1
        return SamplingParams(
            **values,
            flat_logprobs=True,
            routed_experts_prompt_start=draft.num_routed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _reads_mask(self, prompt: PromptGroup) -> bool:
        return self.masks_from_logprobs and prompt.sampling.keep_sampling_mask
