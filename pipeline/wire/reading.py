"""From bytes to carriers, with everything checked that a later stage relies on.

In: a payload from anywhere. Out: a message, or MessageError that says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

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
    PartialGroup,
    PromptGroup,
    RewardResult,
    RolloutGroup,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    Score,
    ScoredGroup,
    TopLogprobs,
    UnfinishedCompletion,
    VersionSpan,
    expert_dtype,
)
from pipeline.wire.fields import Fields, array_of, list_of, natural, number, require, typed, unpack
from pipeline.wire.writing import F32, KINDS, U8, U32


def decode(payload: bytes, expected: type[AnyMessage], *, max_bytes: int = 1 << 28) -> AnyMessage:
    """The message in `payload`, validated.

    Raises MessageError: too large, not msgpack, another schema version or kind, or fields that
    contradict each other.
    """
    if len(payload) > max_bytes:
        raise MessageError(f"payload of {len(payload)} bytes exceeds queues.max_payload_bytes = {max_bytes}")
    envelope = unpack(payload)
    schema = envelope.get("schema")
    if schema != SCHEMA_VERSION:
        raise MessageError(f"schema version {schema!r}, this worker reads {SCHEMA_VERSION}")
    if envelope.get("kind") != KINDS[expected]:
        raise MessageError(f"kind {envelope.get('kind')!r}, expected {KINDS[expected]!r}")
    return cast(AnyMessage, _checked(_READERS[expected], envelope.get("body"), max_bytes))


def _checked(reader: Callable[[Fields, int], Message], body: object, max_bytes: int) -> Message:
    if not isinstance(body, dict):
        raise MessageError(f"body is {type(body).__name__}, expected a map")
    try:
        return reader(body, max_bytes)
    except KeyError as error:
        raise MessageError(f"field {error} is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MessageError(f"field of the wrong type: {error}") from error


def _hops(fields: Fields) -> dict[str, float]:
    hops = typed(fields["hops"], dict, "hops")
    return {typed(station, str, "hop"): number(moment, f"hops.{station}") for station, moment in hops.items()}


def _read_prompt(fields: Fields, _max_bytes: int) -> PromptGroup:
    group = PromptGroup(
        group_id=typed(fields["group_id"], str, "group_id"),
        ordinal=natural(fields, "ordinal"),
        dataset_index=natural(fields, "dataset_index"),
        epoch=natural(fields, "epoch"),
        prompt=_read_prompt_text(fields["prompt"]),
        prompt_token_ids=array_of(fields["prompt_token_ids"], U32, "prompt_token_ids"),
        columns=cast(Mapping[str, Json], typed(fields["columns"], dict, "columns")),
        sampling=_read_sampling(typed(fields["sampling"], dict, "sampling")),
        fed_version=natural(fields, "fed_version"),
        min_version=natural(fields, "min_version"),
        is_evaluation=typed(fields["is_evaluation"], bool, "is_evaluation"),
        hops=_hops(fields),
    )
    require(0 < len(group.group_id) <= 200, "group_id is empty or longer than 200 characters")
    require(len(group.prompt_token_ids) > 0, "prompt_token_ids is empty")
    require(
        group.min_version <= group.fed_version,
        f"min_version {group.min_version} is above fed_version {group.fed_version}",
    )
    return group


def _read_prompt_text(value: object) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    messages = typed(value, list, "prompt")
    for message in messages:
        require(
            isinstance(message, dict) and all(isinstance(item, str) for pair in message.items() for item in pair),
            "prompt holds something else than {role, content} messages",
        )
    return messages


def _read_sampling(fields: Fields) -> SamplingParams:
    sampling = SamplingParams(
        group_size=natural(fields, "group_size"),
        max_tokens=natural(fields, "max_tokens"),
        temperature=number(fields["temperature"], "temperature"),
        top_p=number(fields["top_p"], "top_p"),
        top_k=natural(fields, "top_k"),
        stop=tuple(typed(text, str, "stop") for text in list_of(fields, "stop")),
        seed=natural(fields, "seed"),
        keep_sampling_mask=typed(fields["keep_sampling_mask"], bool, "keep_sampling_mask"),
        keep_routed_experts=typed(fields.get("keep_routed_experts", False), bool, "keep_routed_experts"),
    )
    require(sampling.group_size > 0, "group_size is 0")
    require(sampling.max_tokens > 0, "max_tokens is 0")
    require(sampling.temperature >= 0, f"temperature = {sampling.temperature} is negative")
    require(0 < sampling.top_p <= 1, f"top_p = {sampling.top_p} is outside (0, 1]")
    return sampling


def _read_rollout(fields: Fields, max_bytes: int) -> RolloutGroup:
    prompt = decode(typed(fields["prompt"], bytes, "prompt"), PromptGroup, max_bytes=max_bytes)
    rollout = RolloutGroup(
        prompt=prompt,
        completions=tuple(_read_completion(typed(item, dict, "completion")) for item in list_of(fields, "completions")),
        generator=typed(fields["generator"], str, "generator"),
        hops=_hops(fields),
    )
    expected = prompt.sampling.group_size
    require(len(rollout.completions) == expected, f"{len(rollout.completions)} completions, expected {expected}")
    for completion in rollout.completions:
        routed, num_read = completion.routed_experts, len(prompt.prompt_token_ids) + len(completion) - 1
        require(routed is None or len(routed.ids) == num_read, f"routed_experts are not of {num_read} tokens")
    return rollout


def _read_completion(fields: Fields) -> Completion:
    completion = Completion(
        token_ids=array_of(fields["token_ids"], U32, "token_ids"),
        generator_logprobs=array_of(fields["generator_logprobs"], F32, "generator_logprobs"),
        loss_mask=array_of(fields["loss_mask"], U8, "loss_mask"),
        spans=_read_spans(list_of(fields, "spans")),
        finish_reason=FinishReason(fields["finish_reason"]),
        text=typed(fields["text"], str, "text"),
        sampling_mask=_read_sampling_mask(fields["sampling_mask"]),
        routed_experts=_read_routed_experts(fields.get("routed_experts")),
    )
    _check_tokens(completion)
    require(len(completion.loss_mask) == len(completion), "loss_mask and token_ids differ in length")
    require(bool((completion.loss_mask <= 1).all()), "loss_mask holds something else than 0 and 1")
    return completion


def _check_tokens(completion: Completion | UnfinishedCompletion) -> None:
    num_tokens, mask = len(completion), completion.sampling_mask
    require(num_tokens > 0, "completion without tokens")
    require(len(completion.generator_logprobs) == num_tokens, "generator_logprobs and token_ids differ in length")
    require(completion.spans[-1].first_token < num_tokens, "a version span starts behind the last token")
    if mask is not None:
        require(len(mask.num_kept) == num_tokens, "sampling_mask and token_ids differ in length")
        require(int(mask.num_kept.sum(dtype=np.int64)) == len(mask.kept_ids), "sampling_mask does not add up")


def _read_partial(fields: Fields, max_bytes: int) -> PartialGroup:
    prompt = decode(typed(fields["prompt"], bytes, "prompt"), PromptGroup, max_bytes=max_bytes)
    finished = {typed(index, int, "index"): _read_completion(item) for index, item in list_of(fields, "finished")}
    unfinished = {typed(index, int, "index"): _read_unfinished(item) for index, item in list_of(fields, "unfinished")}
    sampling, indices = prompt.sampling, finished.keys() | unfinished.keys()
    require(indices <= set(range(sampling.group_size)), "a completion that the group does not have")
    require(len(indices) == len(finished) + len(unfinished), "a completion that is both finished and not")
    require(all(len(item) <= sampling.max_tokens for item in finished.values()), "a completion beyond max_tokens")
    require(all(len(item) < sampling.max_tokens for item in unfinished.values()), "a completion that had to end")
    return PartialGroup(prompt=prompt, finished=finished, unfinished=unfinished)


def _read_unfinished(fields: Fields) -> UnfinishedCompletion:
    completion = UnfinishedCompletion(
        token_ids=array_of(fields["token_ids"], U32, "token_ids"),
        generator_logprobs=array_of(fields["generator_logprobs"], F32, "generator_logprobs"),
        spans=_read_spans(list_of(fields, "spans")),
        sampling_mask=_read_sampling_mask(fields["sampling_mask"]),
    )
    _check_tokens(completion)
    require(bool(np.isfinite(completion.generator_logprobs).all()), "a generator logprob that is not finite")
    return completion


def _read_spans(items: Sequence[Any]) -> tuple[VersionSpan, ...]:
    spans = tuple(
        VersionSpan(
            weight_version=typed(version, int, "weight_version"),
            first_token=typed(first, int, "first_token"),
        )
        for version, first in items
    )
    require(len(spans) > 0, "no version span")
    require(spans[0].first_token == 0 and spans[0].weight_version >= 0, "version spans do not start at token 0")
    for before, after in pairwise(spans):
        require(after.first_token > before.first_token, "version spans are not in order")
        require(after.weight_version > before.weight_version, "weight versions go backwards in a completion")
    return spans


def _read_sampling_mask(value: object) -> SamplingMask | None:
    if value is None:
        return None
    kept_ids, num_kept = typed(value, list, "sampling_mask")
    return SamplingMask(kept_ids=array_of(kept_ids, U32, "kept_ids"), num_kept=array_of(num_kept, U32, "num_kept"))


def _read_routed_experts(value: object) -> RoutedExperts | None:
    if value is None:
        return None
    data, *sizes = typed(value, list, "routed_experts")
    num_layers, top_k, num_experts = (typed(size, int, "routed_experts") for size in sizes)
    require(num_layers > 0 and 0 < top_k <= num_experts <= 1 << 16, f"routed_experts: {top_k} of {num_experts}")
    ids = array_of(data, expert_dtype(num_experts), "routed_experts")
    is_whole = len(ids) % (num_layers * top_k) == 0 and int(ids.max(initial=0)) < num_experts
    require(is_whole, f"routed_experts are not {num_layers} x {top_k} ids below {num_experts} for each token")
    return RoutedExperts(ids=ids.reshape(-1, num_layers, top_k), num_experts=num_experts)


def _read_scored(fields: Fields, max_bytes: int) -> ScoredGroup:
    rollout = decode(typed(fields["rollout"], bytes, "rollout"), RolloutGroup, max_bytes=max_bytes)
    scores = tuple(_read_score(typed(item, dict, "score")) for item in list_of(fields, "scores"))
    require(
        len(scores) == len(rollout.completions),
        f"{len(scores)} scores for {len(rollout.completions)} completions",
    )
    for score, completion in zip(scores, rollout.completions, strict=True):
        for name, values in (
            ("token_rewards", score.token_rewards),
            ("teacher_logprobs", score.teacher_logprobs),
        ):
            require(values is None or len(values) == len(completion), f"{name} and token_ids differ in length")
        for top in score.teacher_top:
            require(len(top.token_ids) == len(completion), "teacher_top and token_ids differ in length")
    return ScoredGroup(
        rollout=rollout, scores=scores, scorer=typed(fields["scorer"], str, "scorer"), hops=_hops(fields)
    )


def _read_score(fields: Fields) -> Score:
    reward = fields["reward"]
    return Score(
        reward=None if reward is None else number(reward, "reward"),
        parts=tuple(_read_part(*item) for item in list_of(fields, "parts")),
        token_rewards=_optional_floats(fields["token_rewards"], "token_rewards"),
        teacher_logprobs=_optional_floats(fields["teacher_logprobs"], "teacher_logprobs"),
        teacher_top=tuple(_read_top(item) for item in typed(fields.get("teacher_top", []), list, "teacher_top")),
    )


def _read_top(value: object) -> TopLogprobs:
    ids, logprobs, top_k, weight = typed(value, list, "teacher_top")
    width, top_weight = typed(top_k, int, "teacher_top"), number(weight, "teacher_top weight")
    token_ids, values = array_of(ids, U32, "teacher_top"), array_of(logprobs, F32, "teacher_top")
    is_whole = width > 0 and len(token_ids) == len(values) and len(values) % width == 0
    require(is_whole, f"teacher_top has not {width} ids and logprobs for each token")
    token_ids, values = token_ids.reshape(-1, width), values.reshape(-1, width)
    ordered = np.sort(token_ids, axis=1)
    require(bool((ordered[:, 1:] != ordered[:, :-1]).all()), "teacher_top names an id twice for one token")
    # Not of NaN either. What is above 1 by less is rounding.
    is_mass = bool((values < 0.01).all()) and bool((np.exp(values).sum(axis=1) < 1.01).all())
    require(is_mass and top_weight > 0, "teacher_top holds no probabilities, or a weight that is not above 0")
    return TopLogprobs(token_ids=token_ids, logprobs=values, weight=top_weight)


def _read_part(name: object, value: object, outcome: object, problem: object = "") -> RewardResult:
    return RewardResult(
        name=typed(name, str, "reward name"),
        value=None if value is None else number(value, "reward value"),
        outcome=Outcome(cast(str, outcome)),
        problem=typed(problem, str, "reward problem"),
    )


def _optional_floats(value: object, name: str) -> npt.NDArray[np.float32] | None:
    return None if value is None else array_of(value, F32, name)


_READERS: dict[type[Message], Callable[[Fields, int], Message]] = {
    PromptGroup: _read_prompt,
    RolloutGroup: _read_rollout,
    ScoredGroup: _read_scored,
    PartialGroup: _read_partial,
}
