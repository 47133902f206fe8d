"""From bytes to carriers, with everything checked that a later stage relies on.

In: a payload from anywhere. Out: a message, or MessageError that says what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import MessageError
from pipeline.messages import (
    SCHEMA_VERSION,
    AnyMessage,
    Completion,
    FinishReason,
    Json,
    Message,
    Outcome,
    PromptGroup,
    RewardResult,
    RolloutGroup,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    Score,
    ScoredGroup,
    VersionSpan,
    expert_dtype,
)
from pipeline.wire.writing import F32, KINDS, U8, U32

_Fields = Mapping[str, Any]
_Item = TypeVar("_Item")


def decode(payload: bytes, expected: type[AnyMessage], *, max_bytes: int = 1 << 28) -> AnyMessage:
    """The message in `payload`, validated.

    Raises MessageError: too large, not msgpack, another schema version or kind, or fields that
    contradict each other.
    """
    if len(payload) > max_bytes:
        raise MessageError(f"payload of {len(payload)} bytes exceeds queues.max_payload_bytes = {max_bytes}")
    envelope = _unpack(payload)
    schema = envelope.get("schema")
    if schema != SCHEMA_VERSION:
        raise MessageError(f"schema version {schema!r}, this worker reads {SCHEMA_VERSION}")
    if envelope.get("kind") != KINDS[expected]:
        raise MessageError(f"kind {envelope.get('kind')!r}, expected {KINDS[expected]!r}")
    return cast(AnyMessage, _checked(_READERS[expected], envelope.get("body"), max_bytes))


def _unpack(payload: bytes) -> _Fields:
    try:
        value = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise MessageError(f"expected a map, got {type(value).__name__}")
    return value


def _checked(reader: Callable[[_Fields, int], Message], body: object, max_bytes: int) -> Message:
    if not isinstance(body, dict):
        raise MessageError(f"body is {type(body).__name__}, expected a map")
    try:
        return reader(body, max_bytes)
    except KeyError as error:
        raise MessageError(f"field {error} is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MessageError(f"field of the wrong type: {error}") from error


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise MessageError(problem)


# Texts of problems are only made where there is one: reading is on the way of every group.


def _typed(value: object, kind: type[_Item], name: str) -> _Item:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MessageError(f"{name} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _natural(fields: _Fields, name: str) -> int:
    value = _typed(fields[name], int, name)
    if not 0 <= value < 1 << 63:
        raise MessageError(f"{name} = {value} is out of range")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MessageError(f"{name} is {type(value).__name__}, expected a number")
    if not math.isfinite(value):
        raise MessageError(f"{name} = {value} is not finite")
    return float(value)


def _list(fields: _Fields, name: str) -> list[Any]:
    return _typed(fields[name], list, name)


def _array(value: object, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    data = _typed(value, bytes, name)
    if len(data) % dtype.itemsize:
        raise MessageError(f"{name} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _hops(fields: _Fields) -> dict[str, float]:
    hops = _typed(fields["hops"], dict, "hops")
    return {_typed(station, str, "hop"): _number(moment, f"hops.{station}") for station, moment in hops.items()}


def _read_prompt(fields: _Fields, _max_bytes: int) -> PromptGroup:
    group = PromptGroup(
        group_id=_typed(fields["group_id"], str, "group_id"),
        ordinal=_natural(fields, "ordinal"),
        dataset_index=_natural(fields, "dataset_index"),
        epoch=_natural(fields, "epoch"),
        prompt=_read_prompt_text(fields["prompt"]),
        prompt_token_ids=_array(fields["prompt_token_ids"], U32, "prompt_token_ids"),
        columns=cast(Mapping[str, Json], _typed(fields["columns"], dict, "columns")),
        sampling=_read_sampling(_typed(fields["sampling"], dict, "sampling")),
        fed_version=_natural(fields, "fed_version"),
        min_version=_natural(fields, "min_version"),
        is_evaluation=_typed(fields["is_evaluation"], bool, "is_evaluation"),
        hops=_hops(fields),
    )
    _require(0 < len(group.group_id) <= 200, "group_id is empty or longer than 200 characters")
    _require(len(group.prompt_token_ids) > 0, "prompt_token_ids is empty")
    _require(
        group.min_version <= group.fed_version,
        f"min_version {group.min_version} is above fed_version {group.fed_version}",
    )
    return group


def _read_prompt_text(value: object) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    messages = _typed(value, list, "prompt")
    for message in messages:
        _require(
            isinstance(message, dict) and all(isinstance(item, str) for pair in message.items() for item in pair),
            "prompt holds something else than {role, content} messages",
        )
    return messages


def _read_sampling(fields: _Fields) -> SamplingParams:
    sampling = SamplingParams(
        group_size=_natural(fields, "group_size"),
        max_tokens=_natural(fields, "max_tokens"),
        temperature=_number(fields["temperature"], "temperature"),
        top_p=_number(fields["top_p"], "top_p"),
        top_k=_natural(fields, "top_k"),
        stop=tuple(_typed(text, str, "stop") for text in _list(fields, "stop")),
        seed=_natural(fields, "seed"),
        keep_sampling_mask=_typed(fields["keep_sampling_mask"], bool, "keep_sampling_mask"),
        keep_routed_experts=_typed(fields.get("keep_routed_experts", False), bool, "keep_routed_experts"),
    )
    _require(sampling.group_size > 0, "group_size is 0")
    _require(sampling.max_tokens > 0, "max_tokens is 0")
    _require(sampling.temperature >= 0, f"temperature = {sampling.temperature} is negative")
    _require(0 < sampling.top_p <= 1, f"top_p = {sampling.top_p} is outside (0, 1]")
    return sampling


def _read_rollout(fields: _Fields, max_bytes: int) -> RolloutGroup:
    prompt = decode(_typed(fields["prompt"], bytes, "prompt"), PromptGroup, max_bytes=max_bytes)
    rollout = RolloutGroup(
        prompt=prompt,
        completions=tuple(_read_completion(_typed(item, dict, "completion")) for item in _list(fields, "completions")),
        generator=_typed(fields["generator"], str, "generator"),
        hops=_hops(fields),
    )
    size = prompt.sampling.group_size
    _require(len(rollout.completions) == size, f"{len(rollout.completions)} completions, expected {size}")
    for completion in rollout.completions:
        routed, num_read = completion.routed_experts, len(prompt.prompt_token_ids) + len(completion) - 1
        _require(routed is None or len(routed.ids) == num_read, f"routed_experts are not of {num_read} tokens")
    return rollout


def _read_completion(fields: _Fields) -> Completion:
    completion = Completion(
        token_ids=_array(fields["token_ids"], U32, "token_ids"),
        generator_logprobs=_array(fields["generator_logprobs"], F32, "generator_logprobs"),
        loss_mask=_array(fields["loss_mask"], U8, "loss_mask"),
        spans=_read_spans(_list(fields, "spans")),
        finish_reason=FinishReason(fields["finish_reason"]),
        text=_typed(fields["text"], str, "text"),
        sampling_mask=_read_sampling_mask(fields["sampling_mask"]),
        routed_experts=_read_routed_experts(fields.get("routed_experts")),
    )
    num_tokens = len(completion.token_ids)
    _require(num_tokens > 0, "completion without tokens")
    _require(len(completion.generator_logprobs) == num_tokens, "generator_logprobs and token_ids differ in length")
    _require(len(completion.loss_mask) == num_tokens, "loss_mask and token_ids differ in length")
    _require(bool((completion.loss_mask <= 1).all()), "loss_mask holds something else than 0 and 1")
    _require(completion.spans[-1].first_token < num_tokens, "a version span starts behind the last token")
    mask = completion.sampling_mask
    if mask is not None:
        _require(len(mask.num_kept) == num_tokens, "sampling_mask and token_ids differ in length")
        _require(int(mask.num_kept.sum(dtype=np.int64)) == len(mask.kept_ids), "sampling_mask does not add up")
    return completion


def _read_spans(items: Sequence[Any]) -> tuple[VersionSpan, ...]:
    spans = tuple(
        VersionSpan(
            weight_version=_typed(version, int, "weight_version"),
            first_token=_typed(first, int, "first_token"),
        )
        for version, first in items
    )
    _require(len(spans) > 0, "no version span")
    _require(spans[0].first_token == 0 and spans[0].weight_version >= 0, "version spans do not start at token 0")
    for before, after in pairwise(spans):
        _require(after.first_token > before.first_token, "version spans are not in order")
        _require(after.weight_version > before.weight_version, "weight versions go backwards in a completion")
    return spans


def _read_sampling_mask(value: object) -> SamplingMask | None:
    if value is None:
        return None
    kept_ids, num_kept = _typed(value, list, "sampling_mask")
    return SamplingMask(kept_ids=_array(kept_ids, U32, "kept_ids"), num_kept=_array(num_kept, U32, "num_kept"))


def _read_routed_experts(value: object) -> RoutedExperts | None:
    if value is None:
        return None
    data, *sizes = _typed(value, list, "routed_experts")
    num_layers, top_k, num_experts = (_typed(size, int, "routed_experts") for size in sizes)
    _require(num_layers > 0 and 0 < top_k <= num_experts <= 1 << 16, f"routed_experts: {top_k} of {num_experts}")
    ids = _array(data, expert_dtype(num_experts), "routed_experts")
    is_whole = len(ids) % (num_layers * top_k) == 0 and int(ids.max(initial=0)) < num_experts
    _require(is_whole, f"routed_experts are not {num_layers} x {top_k} ids below {num_experts} for each token")
    return RoutedExperts(ids=ids.reshape(-1, num_layers, top_k), num_experts=num_experts)


def _read_scored(fields: _Fields, max_bytes: int) -> ScoredGroup:
    rollout = decode(_typed(fields["rollout"], bytes, "rollout"), RolloutGroup, max_bytes=max_bytes)
    scores = tuple(_read_score(_typed(item, dict, "score")) for item in _list(fields, "scores"))
    _require(
        len(scores) == len(rollout.completions),
        f"{len(scores)} scores for {len(rollout.completions)} completions",
    )
    for score, completion in zip(scores, rollout.completions, strict=True):
        for name, values in (
            ("token_rewards", score.token_rewards),
            ("teacher_logprobs", score.teacher_logprobs),
        ):
            _require(values is None or len(values) == len(completion), f"{name} and token_ids differ in length")
    return ScoredGroup(
        rollout=rollout, scores=scores, scorer=_typed(fields["scorer"], str, "scorer"), hops=_hops(fields)
    )


def _read_score(fields: _Fields) -> Score:
    reward = fields["reward"]
    return Score(
        reward=None if reward is None else _number(reward, "reward"),
        parts=tuple(_read_part(*item) for item in _list(fields, "parts")),
        token_rewards=_optional_floats(fields["token_rewards"], "token_rewards"),
        teacher_logprobs=_optional_floats(fields["teacher_logprobs"], "teacher_logprobs"),
    )


def _read_part(name: object, value: object, outcome: object, problem: object = "") -> RewardResult:
    return RewardResult(
        name=_typed(name, str, "reward name"),
        value=None if value is None else _number(value, "reward value"),
        outcome=Outcome(cast(str, outcome)),
        problem=_typed(problem, str, "reward problem"),
    )


def _optional_floats(value: object, name: str) -> npt.NDArray[np.float32] | None:
    return None if value is None else _array(value, F32, name)


_READERS: dict[type[Message], Callable[[_Fields, int], Message]] = {
    PromptGroup: _read_prompt,
    RolloutGroup: _read_rollout,
    ScoredGroup: _read_scored,
}
