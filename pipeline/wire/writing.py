"""From carriers to bytes.

In: a message. Out: an envelope with schema version and kind around its fields, in msgpack.
"""

from __future__ import annotations

from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.messages import (
    SCHEMA_VERSION,
    Completion,
    Message,
    PartialGroup,
    PromptGroup,
    RewardResult,
    RolloutGroup,
    RoutedExperts,
    Score,
    ScoredGroup,
    TopLogprobs,
    UnfinishedCompletion,
    expert_dtype,
)

KINDS: dict[type[Message], str] = {
    PromptGroup: "prompt",
    RolloutGroup: "rollout",
    ScoredGroup: "scored",
    PartialGroup: "partial",
}
U32, F32, U8 = np.dtype("<u4"), np.dtype("<f4"), np.dtype("u1")


def encode(message: Message) -> bytes:
    """Bytes of a message; `decode` gives the message back."""
    return _pack({"schema": SCHEMA_VERSION, "kind": KINDS[type(message)], "body": _body(message)})


def _body(message: Message) -> dict[str, Any]:
    match message:
        case PromptGroup():
            return _prompt_body(message)
        case RolloutGroup():
            return {
                "prompt": encode(message.prompt),
                "completions": [_completion_body(completion) for completion in message.completions],
                "generator": message.generator,
                "hops": dict(message.hops),
            }
        case ScoredGroup():
            return {
                "rollout": encode(message.rollout),
                "scores": [_score_body(score) for score in message.scores],
                "scorer": message.scorer,
                "hops": dict(message.hops),
            }
        case PartialGroup():
            return {
                "prompt": encode(message.prompt),
                "finished": [[index, _completion_body(item)] for index, item in message.finished.items()],
                "unfinished": [[index, _tokens_body(item)] for index, item in message.unfinished.items()],
            }


def _prompt_body(group: PromptGroup) -> dict[str, Any]:
    sampling = group.sampling
    return {
        "group_id": group.group_id,
        "ordinal": group.ordinal,
        "dataset_index": group.dataset_index,
        "epoch": group.epoch,
        "prompt": group.prompt,
        "prompt_token_ids": _bytes_of(group.prompt_token_ids, U32),
        "columns": dict(group.columns),
        "sampling": {
            "group_size": sampling.group_size,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "seed": sampling.seed,
            "keep_sampling_mask": sampling.keep_sampling_mask,
            "keep_routed_experts": sampling.keep_routed_experts,
        },
        "fed_version": group.fed_version,
        "min_version": group.min_version,
        "is_evaluation": group.is_evaluation,
        "hops": dict(group.hops),
    }


def _completion_body(completion: Completion) -> dict[str, Any]:
    return {
        **_tokens_body(completion),
        "loss_mask": _bytes_of(completion.loss_mask, U8),
        "finish_reason": completion.finish_reason.value,
        "text": completion.text,
        "routed_experts": completion.routed_experts and _routed_experts_body(completion.routed_experts),
    }


def _tokens_body(completion: Completion | UnfinishedCompletion) -> dict[str, Any]:
    mask = completion.sampling_mask
    return {
        "token_ids": _bytes_of(completion.token_ids, U32),
        "generator_logprobs": _bytes_of(completion.generator_logprobs, F32),
        "spans": [[span.weight_version, span.first_token] for span in completion.spans],
        "sampling_mask": mask and [_bytes_of(mask.kept_ids, U32), _bytes_of(mask.num_kept, U32)],
    }


def _routed_experts_body(routed: RoutedExperts) -> list[bytes | int]:
    _, num_layers, top_k = routed.ids.shape
    return [_bytes_of(routed.ids, expert_dtype(routed.num_experts)), num_layers, top_k, routed.num_experts]


def _score_body(score: Score) -> dict[str, Any]:
    return {
        "reward": score.reward,
        "parts": [_part_body(part) for part in score.parts],
        "token_rewards": _optional_bytes_of(score.token_rewards),
        "teacher_logprobs": _optional_bytes_of(score.teacher_logprobs),
        **({"teacher_top": [_top_body(top) for top in score.teacher_top]} if score.teacher_top else {}),
    }


def _top_body(top: TopLogprobs) -> list[bytes | int | float]:
    return [_bytes_of(top.token_ids, U32), _bytes_of(top.logprobs, F32), top.token_ids.shape[1], top.weight]


def _part_body(part: RewardResult) -> list[object]:
    """Three fields; a problem, which is rare, is the fourth."""
    return [part.name, part.value, part.outcome.value, *([part.problem] if part.problem else [])]


def _bytes_of(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _optional_bytes_of(array: npt.NDArray[np.float32] | None) -> bytes | None:
    return None if array is None else _bytes_of(array, F32)


def _pack(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value, use_bin_type=True))
