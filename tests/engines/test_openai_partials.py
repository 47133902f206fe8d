"""Groups that servers have begun: what is saved of them, and what goes on elsewhere (E3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pipeline.config import ModelSettings
from pipeline.engines import Interrupted
from pipeline.engines.openai import OpenAiEngine
from pipeline.messages import PartialGroup, VersionSpan
from pipeline.wire import decode, encode
from tests.engines.conftest import Serve, Start, group_of, load, shifted, state_of
from tests.engines.stand_in import Handler, StandIn

pytest.importorskip("aiohttp")

TOKENS = list(range(5, 25))


def draws(handler: Handler, number: int) -> None:
    """As many tokens as are asked for, when they are allowed; each names its place in the completion."""
    num_prompt_tokens = 2
    begun = len(handler.body["token_ids"]) - num_prompt_tokens
    handler.draw(TOKENS[begun : begun + handler.body["sampling_params"]["max_tokens"]])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():  # noqa: ASYNC110  another process counts
            await asyncio.sleep(0.001)


async def begun(server: StandIn, engine: OpenAiEngine, number: int) -> asyncio.Task:
    """A group of one completion, of which the server has given so many tokens."""
    task = asyncio.create_task(engine.generate(group_of([4, 5], group_size=1)))
    await allow(server, engine, number)
    return task


async def allow(server: StandIn, engine: OpenAiEngine, number: int) -> None:
    """So many tokens more."""
    before = engine.num_tokens_generated
    server.allowed.release(number)
    await until(lambda: engine.num_tokens_generated == before + number)


async def interrupted(engine: OpenAiEngine, task: asyncio.Task) -> PartialGroup:
    """What is left of the group, off the wire."""
    async with asyncio.timeout(180):
        await engine.interrupt()
        with pytest.raises(Interrupted) as caught:
            await task
    assert engine.num_unfinished_seqs == 0
    return decode(encode(caught.value.partial), PartialGroup)


def spans_of(*spans: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(weight_version=version, first_token=first) for version, first in spans)


async def test_what_a_server_has_given_is_there_while_it_goes_on(serve: Serve, start: Start) -> None:
    server = serve(draws)
    engine = await start(server, stall_s=60)
    task = await begun(server, engine, 7)
    (saved,) = [decode(encode(partial), PartialGroup) for partial in await engine.so_far()]
    assert saved.unfinished[0].token_ids.tolist() == TOKENS[:7]
    assert saved.unfinished[0].generator_logprobs.tolist() == [-0.5] * 7
    assert saved.unfinished[0].spans == spans_of((0, 0))
    await allow(server, engine, 13)
    (completion,) = await task
    assert completion.token_ids.tolist() == TOKENS
    assert await engine.so_far() == []


async def test_after_an_update_no_token_is_saved_whose_weights_only_the_server_knows(
    serve: Serve, start: Start, tiny_model: ModelSettings
) -> None:
    server = serve(draws)
    engine = await start(server, stall_s=60)
    task = await begun(server, engine, 5)
    await engine.apply_weights(state_of(shifted(load(tiny_model), 0.05), 1))
    await allow(server, engine, 4)
    (saved,) = await engine.so_far()
    assert saved.unfinished[0].token_ids.tolist() == TOKENS[:5]
    assert saved.unfinished[0].spans == spans_of((0, 0))
    await allow(server, engine, 11)
    (completion,) = await task
    assert completion.spans == spans_of((0, 0), (1, 5))


async def test_an_interrupted_group_has_all_tokens_with_the_weights_that_drew_them_and_goes_on_elsewhere(
    serve: Serve, start: Start, tiny_model: ModelSettings
) -> None:
    server, other = serve(draws), serve(draws)
    engine = await start(server, stall_s=60)
    task = await begun(server, engine, 5)
    await engine.apply_weights(state_of(shifted(load(tiny_model), 0.05), 1))
    await allow(server, engine, 4)
    partial = await interrupted(engine, task)
    assert partial.unfinished[0].token_ids.tolist() == TOKENS[:9]
    assert partial.unfinished[0].spans == spans_of((0, 0), (1, 5))
    assert server.may_draw.is_set(), "whoever comes next finds it as it was"

    elsewhere = await start(other, stall_s=60)
    await elsewhere.apply_weights(state_of(shifted(load(tiny_model), 0.05), 2))
    other.allowed.release(100)
    (completion,) = await elsewhere.generate(group_of([4, 5], group_size=1), partial)
    assert completion.token_ids.tolist() == TOKENS
    assert completion.generator_logprobs.tolist() == [-0.5] * 20
    assert completion.spans == spans_of((0, 0), (1, 5), (2, 9))
    assert elsewhere.num_tokens_generated == 11


@pytest.mark.parametrize("how", ["refuses", "ignores"])
async def test_of_a_server_that_does_not_break_off_what_is_sure_is_kept(
    serve: Serve, start: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("pipeline.engines.openai_server._LEAVE_TIMEOUT_S", 0.2)
    server = serve(draws)
    engine = await start(server, stall_s=60)
    task = await begun(server, engine, 6)
    getattr(server, how).add("/pause?mode=abort&clear_cache=false")
    partial = await interrupted(engine, task)
    assert partial.unfinished[0].token_ids.tolist() == TOKENS[:6]


async def test_nothing_is_known_of_tokens_that_came_when_others_may_have_had_the_server(
    serve: Serve, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(draws)
    engine = await start(server, stall_s=60)
    task = await begun(server, engine, 3)
    monkeypatch.setattr("pipeline.engines.openai_server._OWNED_FOR_S", 0.0)
    await allow(server, engine, 3)
    (saved,) = await engine.so_far()
    assert saved.unfinished[0].token_ids.tolist() == TOKENS[:3]
    task.cancel()


async def test_nothing_is_kept_of_what_foreign_weights_have_drawn(serve: Serve, start: Start) -> None:
    asked: list[list[int]] = []

    def foreign_at_first(handler: Handler, number: int) -> None:
        asked.append(handler.body["token_ids"])
        handler.server.label = "stranger" if number == 1 else handler.server.label
        draws(handler, number)

    server = serve(foreign_at_first)
    engine = await start(server, stall_s=60)
    server.allowed.release(100)
    (completion,) = await engine.generate(group_of([4, 5], group_size=1))
    assert completion.token_versions.tolist() == [0] * 20
    assert asked == [[4, 5], [4, 5]]
