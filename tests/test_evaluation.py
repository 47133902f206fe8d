"""Evaluation is reported under the versions that made it, and does not wait for what is dead."""

from __future__ import annotations

import asyncio
import dataclasses

from redis.asyncio import Redis

from pipeline.config import QueueSettings
from pipeline.evaluation import Evaluator
from pipeline.keys import Keys, Stream
from pipeline.messages import PromptGroup
from pipeline.streams import DropReason, Streams
from tests.groups import make_prompt, make_scored


async def _opened(redis: Redis, keys: Keys) -> Streams:
    streams = Streams(redis, keys, QueueSettings(), consumer="evaluation-test")
    await streams.open()
    return streams


def _prompts(number: int, version: int) -> list[PromptGroup]:
    return [
        make_prompt(index, group_id=f"eval-{version}-{index}", group_size=1, version=version, is_evaluation=True)
        for index in range(number)
    ]


async def test_a_round_is_reported_once_all_its_groups_are_back(redis: Redis, keys: Keys) -> None:
    evaluator = Evaluator(await _opened(redis, keys))
    prompts = _prompts(3, version=4)
    await evaluator.start(prompts, 4)
    for prompt, reward, version in zip(prompts, [1.0, 0.0, None], [4, 5, 5], strict=True):
        assert evaluator.take_reports() == []
        evaluator.receive(make_scored(prompt, [reward], version=version))
    (report,) = evaluator.take_reports()
    assert report.asked_version == 4
    assert (report.weight_version_min, report.weight_version_max) == (4, 5)
    assert (report.num_groups, report.num_scored, report.reward_mean) == (3, 2, 0.5)
    assert report.rewards == {"test": 0.5}
    assert [group.rollout.prompt.ordinal for group in report.samples] == [0, 1, 2]
    assert evaluator.take_reports() == []


async def test_the_same_group_twice_counts_once_and_a_foreign_one_never(redis: Redis, keys: Keys) -> None:
    evaluator = Evaluator(await _opened(redis, keys))
    prompts = _prompts(2, version=0)
    await evaluator.start(prompts, 0)
    evaluator.receive(make_scored(prompts[0], [1.0]))
    evaluator.receive(make_scored(prompts[0], [1.0]))
    evaluator.receive(make_scored(dataclasses.replace(prompts[1], group_id="eval-9-1"), [1.0]))
    assert evaluator.take_reports() == []
    evaluator.receive(make_scored(prompts[1], [0.0]))
    (report,) = evaluator.take_reports()
    assert report.reward_mean == 0.5


async def test_waiting_ends_when_what_is_missing_is_dead(redis: Redis, keys: Keys) -> None:
    streams = await _opened(redis, keys)
    evaluator = Evaluator(streams)
    prompts = _prompts(2, version=0)
    await evaluator.start(prompts, 0)
    waiting = asyncio.create_task(evaluator.wait(0, poll_s=0.01))
    alive, dead = await streams.claim(Stream.PROMPTS, 2, block_s=1.0)
    assert await streams.dead_letter(dead, "no one can")
    evaluator.receive(make_scored(prompts[int(alive.group_id[-1])], [1.0]))
    await streams.drop([alive], DropReason.UNSCORED)
    async with asyncio.timeout(180):
        await waiting
    (report,) = evaluator.take_reports()
    assert (report.num_groups, report.reward_mean) == (1, 1.0)
    assert (await streams.ledger()).balances
