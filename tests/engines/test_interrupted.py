"""Groups that are interrupted on one engine and completed by another.

Scenario E3.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from pipeline.config import GenerationSettings, ModelSettings, ScriptedSettings
from pipeline.engines import GenerationEngine, Interrupted
from pipeline.engines.scripted import ScriptedEngine
from pipeline.messages import Completion, PartialGroup, PromptGroup, VersionSpan
from pipeline.wire import decode, encode
from tests.engines.conftest import MakeEngine, Serve, Start, group_of, load, plain_logits, shifted, state_of
from tests.engines.stand_in import Handler
from tests.engines.test_scripted import started, weights

TOLERANCE = 1e-4


async def interrupted(
    engine: GenerationEngine, *groups: PromptGroup, after: int, partials: dict[str, PartialGroup] | None = None
) -> dict[str, PartialGroup]:
    """Group id -> what an engine has after so many tokens of those that it has not completed, off the wire."""
    tasks = [asyncio.create_task(engine.generate(group, (partials or {}).get(group.group_id))) for group in groups]
    async with asyncio.timeout(180):
        before = engine.num_tokens_generated
        while engine.num_tokens_generated < before + after:  # noqa: ASYNC110  its tokens are what is waited for
            await asyncio.sleep(0.001)
        on_the_way = [decode(encode(partial), PartialGroup) for partial in await engine.so_far()]
        await engine.interrupt()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, Interrupted | tuple) for result in results), results
    left = [result.partial for result in results if isinstance(result, Interrupted)]
    assert left
    assert engine.num_unfinished_seqs == 0
    by_group = {group.group_id: result for group, result in zip(groups, results, strict=True)}
    for partial in on_the_way:
        assert_on_the_way_to(partial, by_group[partial.prompt.group_id])
    return {partial.prompt.group_id: decode(encode(partial), PartialGroup) for partial in left}


def assert_on_the_way_to(saved: PartialGroup, result: object) -> None:
    """What was saved while its group went on is the beginning of what became of that, bit by bit."""
    later = dict(enumerate(result)) if isinstance(result, tuple) else {}
    if isinstance(result, Interrupted):
        later = {**result.partial.unfinished, **result.partial.finished}
    assert saved.num_tokens
    for index, begun in [*saved.unfinished.items(), *saved.finished.items()]:
        length = len(begun)
        assert later[index].token_ids[:length].tobytes() == begun.token_ids.tobytes()
        assert later[index].generator_logprobs[:length].tobytes() == begun.generator_logprobs.tobytes()
        assert later[index].token_versions[:length].tolist() == begun.token_versions.tolist()
        assert (later[index].sampling_mask is None) == (begun.sampling_mask is None)


def assert_goes_on(partial: PartialGroup, completions: tuple[Completion, ...]) -> None:
    """What had been generated is there, bit by bit."""
    for index, finished in partial.finished.items():
        assert completions[index].token_ids.tobytes() == finished.token_ids.tobytes()
        assert completions[index].generator_logprobs.tobytes() == finished.generator_logprobs.tobytes()
        assert (completions[index].spans, completions[index].text) == (finished.spans, finished.text)
    for index, begun in partial.unfinished.items():
        whole, length = completions[index], len(begun)
        assert len(whole) > length
        assert whole.token_ids[:length].tobytes() == begun.token_ids.tobytes()
        assert whole.generator_logprobs[:length].tobytes() == begun.generator_logprobs.tobytes()
        assert whole.token_versions[:length].tolist() == begun.token_versions.tolist()
        if begun.sampling_mask is not None:
            assert whole.sampling_mask is not None
            kept = begun.sampling_mask.kept_ids
            assert whole.sampling_mask.kept_ids[: len(kept)].tobytes() == kept.tobytes()


async def test_a_completion_that_goes_on_elsewhere_is_the_one_that_was_never_interrupted(
    make_engine: MakeEngine,
) -> None:
    groups = [
        group_of([4, 5, 6], ordinal=0, max_tokens=90),
        group_of([7], ordinal=1, max_tokens=100, top_p=0.8, keep_sampling_mask=True),
        group_of(list(range(4, 24)), ordinal=2, max_tokens=60, temperature=0.7),
        group_of([9, 9], ordinal=3, max_tokens=8),
        group_of([4, 5, 6], ordinal=4, max_tokens=50),
    ]
    first, second, whole = await make_engine(max_num_seqs=14), await make_engine(max_num_seqs=6), await make_engine()
    by_group = await interrupted(first, *groups[:3], groups[4], after=200)
    assert sum(len(partial.unfinished) for partial in by_group.values()) >= 6
    assert any(partial.finished for partial in by_group.values())
    results = await asyncio.gather(*(second.generate(group, by_group.get(group.group_id)) for group in groups))
    expected = await asyncio.gather(*(whole.generate(group) for group in groups))
    assert second.num_tokens_generated == sum(len(item) for result in results for item in result) - sum(
        partial.num_tokens for partial in by_group.values()
    )
    for group, result, uninterrupted in zip(groups, results, expected, strict=True):
        if (partial := by_group.get(group.group_id)) is not None:
            assert_goes_on(partial, result)
        for mine, theirs in zip(result, uninterrupted, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert (mine.text, mine.finish_reason, mine.spans) == (theirs.text, theirs.finish_reason, theirs.spans)
            np.testing.assert_allclose(mine.generator_logprobs, theirs.generator_logprobs, atol=TOLERANCE)
            assert (mine.sampling_mask is None) == (theirs.sampling_mask is None)
            if mine.sampling_mask is not None and theirs.sampling_mask is not None:
                assert mine.sampling_mask.kept_ids.tolist() == theirs.sampling_mask.kept_ids.tolist()


async def test_tokens_of_newer_weights_follow_those_of_older_ones(
    make_engine: MakeEngine, tiny_model: ModelSettings
) -> None:
    group = group_of([4, 5, 6], max_tokens=100, temperature=0.8, group_size=12)
    (partial,) = (await interrupted(await make_engine(), group, after=40)).values()
    newer = shifted(load(tiny_model), 0.05)
    engine = await make_engine()
    await engine.apply_weights(state_of(newer, 3))
    completions = await engine.generate(group, partial)
    assert_goes_on(partial, completions)
    for index, begun in partial.unfinished.items():
        completion, length = completions[index], len(begun)
        assert completion.spans == (
            VersionSpan(weight_version=0, first_token=0),
            VersionSpan(weight_version=3, first_token=length),
        )
        expected = (plain_logits(newer, group, completion) / 0.8).log_softmax(-1).numpy()
        drawn = expected[np.arange(len(completion)), completion.token_ids]
        np.testing.assert_allclose(completion.generator_logprobs[length:], drawn[length:], atol=TOLERANCE)


async def test_a_group_that_waits_or_is_interrupted_again_loses_nothing(make_engine: MakeEngine) -> None:
    groups = [group_of([4, 5, 6], ordinal=ordinal, max_tokens=100, group_size=6) for ordinal in range(3)]
    first = await interrupted(await make_engine(), *groups, after=100)
    groups = [group for group in groups if group.group_id in first]
    engine = await make_engine(max_num_seqs=1)
    again = await interrupted(engine, *groups, after=10, partials=first)
    assert len(again) >= len(first) - 1
    for group_id, after in again.items():
        before = first[group_id]
        assert after.num_tokens >= before.num_tokens
        assert {*before.finished} <= {*after.finished}
        for index, begun in before.unfinished.items():
            more = after.unfinished.get(index) or after.finished[index]
            assert more.token_ids[: len(begun)].tolist() == begun.token_ids.tolist()
    groups = [group for group in groups if group.group_id in again]
    with pytest.raises(Interrupted) as caught:
        await engine.generate(groups[0], again[groups[0].group_id])
    assert caught.value.partial.num_tokens == again[groups[0].group_id].num_tokens
    last, whole = await make_engine(), await make_engine()
    for group in groups:
        result, uninterrupted = await last.generate(group, again[group.group_id]), await whole.generate(group)
        assert [item.text for item in result] == [item.text for item in uninterrupted]


async def scripted(version: int = 0, *, max_num_seqs: int = 64, tokens_per_s: float = 1000) -> ScriptedEngine:
    engine = await started(tokens_per_s=tokens_per_s, length_mean=200, length_sigma=1.0, max_num_seqs=max_num_seqs)
    await engine.apply_weights(weights(version))
    return engine


async def test_what_is_saved_while_a_group_goes_on_can_be_gone_on_from_elsewhere(make_engine: MakeEngine) -> None:
    group = group_of([4, 5, 6], max_tokens=100, group_size=4, top_p=0.9, keep_sampling_mask=True)
    first, second = await make_engine(), await make_engine()
    task = asyncio.create_task(first.generate(group))
    async with asyncio.timeout(180):
        while first.num_tokens_generated < 40:  # noqa: ASYNC110  its tokens are what is waited for
            await asyncio.sleep(0.001)
        (saved,) = await first.so_far()
    assert saved.unfinished
    result, elsewhere = await task, await second.generate(group, decode(encode(saved), PartialGroup))
    assert_goes_on(saved, elsewhere)
    assert [item.token_ids.tolist() for item in elsewhere] == [item.token_ids.tolist() for item in result]
    assert second.num_tokens_generated == first.num_tokens_generated - saved.num_tokens
    assert await first.so_far() == []


async def test_the_scripted_engine_goes_on_as_if_it_had_generated_the_beginning() -> None:
    groups = [group_of([1, 2, 3], ordinal=ordinal, group_size=6, max_tokens=300) for ordinal in range(2)]
    # Slow enough for a busy machine to interrupt it before a group is whole.
    partials = list((await interrupted(await scripted(max_num_seqs=8, tokens_per_s=100), *groups, after=500)).values())
    assert len(partials) == 2
    assert any(partial.unfinished for partial in partials)
    second = await scripted(2, tokens_per_s=50000)
    results = await asyncio.gather(*map(second.generate, groups, partials))
    expected = await asyncio.gather(*map((await scripted(2, tokens_per_s=1e6)).generate, groups))
    num_tokens = sum(len(item) for result in results for item in result)
    assert second.num_tokens_generated == num_tokens - sum(partial.num_tokens for partial in partials)
    for partial, result, uninterrupted in zip(partials, results, expected, strict=True):
        assert_goes_on(partial, result)
        for index, (mine, theirs) in enumerate(zip(result, uninterrupted, strict=True)):
            assert mine.token_ids.tobytes() == theirs.token_ids.tobytes()
            assert mine.generator_logprobs.tobytes() == theirs.generator_logprobs.tobytes()
            versions = [span.weight_version for span in mine.spans]
            assert versions == ([0] if index in partial.finished else [0, 2] if index in partial.unfinished else [2])
    settings = GenerationSettings(scripted=ScriptedSettings(realtime=False, length_mean=200, length_sigma=1.0))
    at_once = ScriptedEngine(settings, seed=0)
    await at_once.start()
    await at_once.apply_weights(weights(2))
    for partial, group, result in zip(partials, groups, results, strict=True):
        same = await at_once.generate(group, partial)
        assert [(item.token_ids.tolist(), item.spans) for item in same] == [
            (item.token_ids.tolist(), item.spans) for item in result
        ]


async def test_of_servers_that_do_not_help_whole_completions_are_kept_and_the_rest_is_asked_for_again(
    serve: Serve, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engines.openai_server._LEAVE_TIMEOUT_S", 0.1)

    def one_of_three(handler: Handler, number: int) -> None:
        handler.tokens([5, 6, 7]) if number == 1 else handler.hang()

    group = group_of([4, 5], group_size=3)
    first = await start(serve(one_of_three), stall_s=30.0)
    task = asyncio.create_task(first.generate(group))
    async with asyncio.timeout(180):
        while (first.num_tokens_generated, first.num_unfinished_seqs) != (3, 2):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await first.interrupt()
        with pytest.raises(Interrupted) as caught:
            await task
    partial = caught.value.partial
    assert [len(partial.finished), len(partial.unfinished)] == [1, 0]
    server = serve(lambda handler, number: handler.tokens([8, 9]))
    completions = await (await start(server)).generate(group, partial)
    assert_goes_on(partial, completions)
    assert sorted(completion.token_ids.tolist() for completion in completions) == [[5, 6, 7], [8, 9], [8, 9]]
    assert server.num_requests == 2


def test_a_partial_belongs_to_one_prompt_and_one_way_to_sample() -> None:
    group = group_of([4, 5, 6])
    partial = PartialGroup(prompt=group, finished={}, unfinished={})
    assert partial.fits(group_of([4, 5, 6]))
    others: list[Callable[[], PromptGroup]] = [
        lambda: group_of([4, 5, 7]),
        lambda: group_of([4, 5, 6], temperature=0.5),
        lambda: group_of([4, 5, 6], ordinal=1),
        lambda: dataclasses.replace(group, group_id="other"),
    ]
    assert not any(partial.fits(other()) for other in others)
