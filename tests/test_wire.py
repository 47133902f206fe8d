"""Messages survive the wire unchanged, and nothing invalid comes off it."""

from __future__ import annotations

import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.errors import MessageError
from pipeline.messages import (
    Completion,
    FinishReason,
    PartialGroup,
    PromptGroup,
    RolloutGroup,
    RoutedExperts,
    SamplingMask,
    Score,
    ScoredGroup,
    TopLogprobs,
    UnfinishedCompletion,
    VersionSpan,
    expert_dtype,
)
from pipeline.wire import decode, encode
from tests.groups import make_completion, make_prompt, make_rollout, make_scored

LARGEST_ID = 2**32 - 1
PROMPT_TOKENS = 3
NO_NUMBER = np.array([np.nan], dtype=np.float32)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    length = draw(st.integers(1, 20))
    starts = sorted({0, *draw(st.lists(st.integers(0, length - 1), max_size=3))})
    versions = sorted(draw(st.sets(st.integers(0, 2**40), min_size=len(starts), max_size=len(starts))))
    num_experts = draw(st.sampled_from([4, 256, 257, 1 << 16]))
    shape = (PROMPT_TOKENS + length - 1, *draw(st.tuples(st.integers(1, 3), st.integers(1, 4))))
    experts = hnp.arrays(expert_dtype(num_experts), shape, elements=st.integers(0, num_experts - 1))
    num_kept = draw(hnp.arrays(np.uint32, length, elements=st.integers(1, 3)))
    total = int(num_kept.sum())
    return Completion(
        token_ids=draw(hnp.arrays(np.uint32, length, elements=st.integers(0, LARGEST_ID))),
        generator_logprobs=draw(hnp.arrays(np.float32, length, elements=st.floats(width=32))),
        loss_mask=draw(hnp.arrays(np.uint8, length, elements=st.integers(0, 1))),
        spans=tuple(
            VersionSpan(weight_version=version, first_token=first)
            for version, first in zip(versions, starts, strict=True)
        ),
        finish_reason=draw(st.sampled_from(FinishReason)),
        text=draw(st.text(st.characters(codec="utf-8"), max_size=20)),
        sampling_mask=draw(
            st.none() | st.just(SamplingMask(kept_ids=np.arange(total, dtype=np.uint32), num_kept=num_kept))
        ),
        routed_experts=draw(
            st.none() | experts.map(lambda ids: RoutedExperts(ids=ids, num_experts=num_experts)),
        ),
    )


@st.composite
def tops(draw: st.DrawFn, length: int) -> TopLogprobs:
    """Any ids, each once for a token, and any shares of its probability."""
    top_k = draw(st.integers(1, 5))
    ids = [draw(st.lists(st.integers(0, LARGEST_ID), min_size=top_k, max_size=top_k, unique=True)) for _ in range(2)]
    logprobs = hnp.arrays(np.float32, (length, top_k), elements=st.sampled_from([-np.inf, -1e30, -7.25, -2.0]))
    return TopLogprobs(
        token_ids=np.array([ids[place % 2] for place in range(length)], dtype=np.uint32),
        logprobs=draw(logprobs),
        weight=draw(st.floats(0.5, 100)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(completions(), min_size=1, max_size=3), st.data())
def test_every_valid_group_comes_back_as_it_was(items: list[Completion], data: st.DataObject) -> None:
    prompt = make_prompt(3, group_size=len(items), columns={"answer": "x", "tags": [1, None, {"a": True}]})
    floats = st.none() | st.floats(allow_nan=False, allow_infinity=False)
    rollout = RolloutGroup(prompt=prompt, completions=tuple(items), generator="g", hops={"generated": 1.5})
    scores = tuple(
        Score(
            reward=data.draw(floats),
            token_rewards=np.ones(len(item), dtype=np.float32),
            teacher_logprobs=np.zeros(len(item), dtype=np.float32),
            teacher_top=tuple(data.draw(st.lists(tops(len(item)), max_size=2))),
        )
        for item in items
    )
    group = ScoredGroup(rollout=rollout, scores=scores, scorer="s")
    payload = encode(group)
    back = decode(payload, ScoredGroup)
    assert encode(back) == payload
    for sent, received in zip(items, back.rollout.completions, strict=True):
        assert received.token_ids.tolist() == sent.token_ids.tolist()
        np.testing.assert_array_equal(received.generator_logprobs, sent.generator_logprobs)
        assert received.spans == sent.spans
        assert received.text == sent.text
        assert (received.routed_experts is None) == (sent.routed_experts is None)
        if sent.routed_experts is not None and received.routed_experts is not None:
            np.testing.assert_array_equal(received.routed_experts.ids, sent.routed_experts.ids)
            assert received.routed_experts.ids.dtype == expert_dtype(sent.routed_experts.num_experts)
            assert received.routed_experts.num_experts == sent.routed_experts.num_experts
    assert [score.reward for score in back.scores] == [score.reward for score in scores]
    for sent, received in zip(scores, back.scores, strict=True):
        for one, other in zip(sent.teacher_top, received.teacher_top, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert one.weight == other.weight
    assert back.rollout.prompt.columns == prompt.columns


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_payload_is_refused_or_still_valid_but_never_crashes(data: st.DataObject) -> None:
    payload = bytearray(encode(make_scored(make_prompt(), [1.0, None])))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        try:
            decode(damaged, ScoredGroup)
        except MessageError:
            continue


def _begun(completion: Completion) -> UnfinishedCompletion:
    return UnfinishedCompletion(
        token_ids=completion.token_ids,
        generator_logprobs=np.nan_to_num(completion.generator_logprobs),
        spans=completion.spans,
        sampling_mask=completion.sampling_mask,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(completions(), min_size=2, max_size=4))
def test_what_there_is_of_a_group_comes_back_as_it_was(items: list[Completion]) -> None:
    prompt = make_prompt(3, group_size=len(items) + 1, max_tokens=21)
    unfinished = {0: _begun(items[0]), len(items): _begun(items[-1])}
    group = PartialGroup(prompt=prompt, finished=dict(enumerate(items[1:-1], start=1)), unfinished=unfinished)
    payload = encode(group)
    back = decode(payload, PartialGroup)
    assert encode(back) == payload
    assert back.fits(prompt)
    assert back.num_tokens == group.num_tokens
    for index, item in group.unfinished.items():
        assert back.unfinished[index].token_ids.tolist() == item.token_ids.tolist()
        assert back.unfinished[index].token_versions.tolist() == item.token_versions.tolist()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"finished": {2: make_completion(4)}}, "that the group does not have"),
        ({"finished": {-1: make_completion(4)}}, "that the group does not have"),
        ({"finished": {1: make_completion(4)}}, "both finished and not"),
        ({"finished": {0: make_completion(17)}}, "beyond max_tokens"),
        ({"unfinished": {1: _begun(make_completion(16))}}, "that had to end"),
        ({"unfinished": {1: _begun(make_completion(0))}}, "without tokens"),
        ({"unfinished": {1: _begun(make_completion(2, spans=[(0, 0), (1, 2)]))}}, "behind the last"),
        (
            {"unfinished": {1: dataclasses.replace(_begun(make_completion(1)), generator_logprobs=NO_NUMBER)}},
            "not finite",
        ),
    ],
)
def test_a_partial_that_contradicts_itself_is_refused(change: dict[str, object], problem: str) -> None:
    group = PartialGroup(prompt=make_prompt(), finished={}, unfinished={1: _begun(make_completion(4))})
    assert decode(encode(group), PartialGroup).num_tokens == 4
    with pytest.raises(MessageError, match=problem):
        decode(encode(dataclasses.replace(group, **change)), PartialGroup)  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        decode(payload, PromptGroup)


def test_a_payload_over_the_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(MessageError, match="max_payload_bytes = 10"):
        decode(b"x" * 11, PromptGroup, max_bytes=10)


def test_another_schema_version_is_named() -> None:
    with pytest.raises(MessageError, match="schema version 99"):
        decode(msgpack.packb({"schema": 99, "kind": "prompt", "body": {}}), PromptGroup)


def test_a_group_of_another_stage_is_named() -> None:
    with pytest.raises(MessageError, match="'prompt', expected 'scored'"):
        decode(encode(make_prompt()), ScoredGroup)


def _rollout_with(completion: Completion) -> bytes:
    prompt = make_prompt(group_size=1)
    return encode(RolloutGroup(prompt=prompt, completions=(completion,), generator="g"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spans": ()}, "no version span"),
        ({"spans": (VersionSpan(weight_version=0, first_token=1),)}, "do not start at token 0"),
        ({"spans": (VersionSpan(weight_version=-1, first_token=0),)}, "do not start at token 0"),
        (
            {"spans": tuple(VersionSpan(weight_version=v, first_token=f) for v, f in [(2, 0), (1, 2)])},
            "go backwards",
        ),
        (
            {"spans": tuple(VersionSpan(weight_version=v, first_token=f) for v, f in [(0, 0), (1, 4)])},
            "behind the last",
        ),
        ({"generator_logprobs": np.zeros(3, dtype=np.float32)}, "generator_logprobs and token_ids differ"),
        ({"loss_mask": np.full(4, 2, dtype=np.uint8)}, "something else than 0 and 1"),
        ({"token_ids": np.zeros(0, dtype=np.uint32)}, "without tokens"),
    ],
)
def test_a_completion_that_contradicts_itself_is_refused(change: dict[str, object], problem: str) -> None:
    completion = dataclasses.replace(make_completion(4), **change)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=problem):
        decode(_rollout_with(completion), RolloutGroup)


def _routed(shape: tuple[int, ...] = (6, 2, 2), num_experts: int = 8, largest: int = 7) -> RoutedExperts:
    return RoutedExperts(ids=np.full(shape, largest, dtype=expert_dtype(num_experts)), num_experts=num_experts)


@pytest.mark.parametrize(
    ("routed", "problem"),
    [
        (_routed((5, 2, 2)), "not of 6 tokens"),
        (_routed((7, 2, 2)), "not of 6 tokens"),
        (_routed(largest=8), "2 x 2 ids below 8"),
        (_routed((6, 2, 9)), "9 of 8"),
        (_routed((6, 0, 2)), "2 of 8"),
        (_routed(num_experts=(1 << 16) + 1), "2 of 65537"),
    ],
)
def test_routed_experts_that_do_not_fit_are_refused(routed: RoutedExperts, problem: str) -> None:
    assert decode(_rollout_with(dataclasses.replace(make_completion(4), routed_experts=_routed())), RolloutGroup)
    completion = dataclasses.replace(make_completion(4), routed_experts=routed)
    with pytest.raises(MessageError, match=problem):
        decode(_rollout_with(completion), RolloutGroup)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([b"123", 1, 2, 8], "1 x 2 ids"),
        ([b"1234", 1, 2, 300], "not 1 x 2|name|ids below 300"),
        ([b"12", 1, 2], "wrong type"),
        ([b"12", 1, 2.0, 8], "expected int"),
        ([b"12", 1, True, 8], "expected int"),
        (["12", 1, 2, 8], "expected bytes"),
        ({}, "expected list"),
    ],
)
def test_routed_experts_of_the_wrong_form_are_refused(value: object, problem: str) -> None:
    payload = msgpack.unpackb(_rollout_with(make_completion(4)))
    payload["body"]["completions"][0]["routed_experts"] = value
    with pytest.raises(MessageError, match=problem):
        decode(msgpack.packb(payload), RolloutGroup)


def test_a_message_from_before_experts_were_recorded_has_none() -> None:
    payload = msgpack.unpackb(_rollout_with(make_completion(4)))
    del payload["body"]["completions"][0]["routed_experts"]
    prompt = msgpack.unpackb(payload["body"]["prompt"])
    del prompt["body"]["sampling"]["keep_routed_experts"]
    payload["body"]["prompt"] = msgpack.packb(prompt)
    back = decode(msgpack.packb(payload), RolloutGroup)
    assert back.completions[0].routed_experts is None
    assert not back.prompt.sampling.keep_routed_experts


def _top(ids: list[list[int]], logprobs: list[list[float]], weight: float = 1.0) -> TopLogprobs:
    return TopLogprobs(
        token_ids=np.array(ids, dtype=np.uint32), logprobs=np.array(logprobs, dtype=np.float32), weight=weight
    )


@pytest.mark.parametrize(
    ("top", "problem"),
    [
        (_top([[3, 4]] * 3, [[-1, -2]] * 3), "teacher_top and token_ids differ in length"),
        (_top([[3, 3]] * 4, [[-1, -2]] * 4), "names an id twice"),
        (_top([[3, 4]] * 4, [[-1, np.nan]] * 4), "holds no probabilities"),
        (_top([[3, 4]] * 4, [[-0.5, -0.6]] * 4), "holds no probabilities"),
        (_top([[3, 4]] * 4, [[np.inf, -1]] * 4), "holds no probabilities"),
        (_top([[3, 4]] * 4, [[-1, -2]] * 4, weight=0.0), "a weight that is not above 0"),
        (_top([[3, 4]] * 4, [[-1, -2]] * 4, weight=np.inf), "not finite"),
        (_top([[]] * 4, [[]] * 4), "not 0 ids and logprobs"),
        (_top([[3, 4]] * 4, [[-1]] * 4), "not 2 ids and logprobs"),
    ],
)
def test_likeliest_ids_that_do_not_fit_are_refused(top: TopLogprobs, problem: str) -> None:
    group = make_scored(make_prompt(), [1.0, 0.0])
    plain = encode(group)
    assert b"teacher_top" not in plain
    score = dataclasses.replace(group.scores[0], teacher_logprobs=np.zeros(4, dtype=np.float32))
    for given_top, refused in ((_top([[3, 4]] * 4, [[-1, -np.inf]] * 4), None), (top, problem)):
        told = dataclasses.replace(score, teacher_top=(given_top,))
        payload = encode(dataclasses.replace(group, scores=(told, group.scores[1])))
        if refused is None:
            assert decode(payload, ScoredGroup).scores[0].teacher_top
            continue
        with pytest.raises(MessageError, match=refused):
            decode(payload, ScoredGroup)


def test_a_group_with_a_completion_missing_is_refused() -> None:
    rollout = make_rollout(make_prompt(group_size=3))
    short = dataclasses.replace(rollout, completions=rollout.completions[:2])
    with pytest.raises(MessageError, match="2 completions, expected 3"):
        decode(encode(short), RolloutGroup)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(MessageError, match="not finite"):
        decode(encode(make_scored(make_prompt(), [1.0, float("nan")])), ScoredGroup)


def test_a_logprob_that_is_not_finite_travels_for_the_trainer_to_mask() -> None:
    completion = dataclasses.replace(
        make_completion(2), generator_logprobs=np.array([-np.inf, np.nan], dtype=np.float32)
    )
    back = decode(_rollout_with(completion), RolloutGroup)
    assert not np.isfinite(back.completions[0].generator_logprobs).any()


def test_token_versions_follow_the_spans() -> None:
    completion = make_completion(6, spans=[(3, 0), (4, 2), (7, 5)])
    assert completion.token_versions.tolist() == [3, 3, 4, 4, 4, 7]
