"""An engine that leaves its device for a while: nothing is drawn meanwhile, and nothing is lost."""

from __future__ import annotations

import asyncio

from tests.engines.conftest import MakeEngine, group_of
from tests.weights.states import until


async def test_a_completion_is_the_same_with_a_sleep_in_its_middle(make_engine: MakeEngine) -> None:
    groups = [group_of([4, 5, 6], ordinal=ordinal, max_tokens=100, group_size=6) for ordinal in range(4)]
    engine, whole = await make_engine(max_num_seqs=8), await make_engine(max_num_seqs=8)
    tasks = [asyncio.create_task(engine.generate(group)) for group in groups[:3]]
    await until(lambda: engine.num_tokens_generated > 50)
    await engine.sleep()
    before, late = engine.num_tokens_generated, asyncio.create_task(engine.generate(groups[3]))
    assert (await asyncio.wait([*tasks, late], timeout=0.2))[0] == set()
    assert engine.num_tokens_generated == before
    assert engine.num_unfinished_seqs > 6
    await engine.wake_up()
    results = await asyncio.gather(*tasks, late)
    expected = await asyncio.gather(*map(whole.generate, groups))
    for result, uninterrupted in zip(results, expected, strict=True):
        for mine, theirs in zip(result, uninterrupted, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert (mine.text, mine.spans) == (theirs.text, theirs.spans)


async def test_who_sleeps_can_be_interrupted_and_closed(make_engine: MakeEngine) -> None:
    engine = await make_engine()
    task = asyncio.create_task(engine.generate(group_of([4, 5, 6], max_tokens=100)))
    await until(lambda: engine.num_tokens_generated > 0)
    await engine.sleep()
    await engine.interrupt()
    async with asyncio.timeout(180):
        await asyncio.gather(task, return_exceptions=True)
    assert engine.num_unfinished_seqs == 0
