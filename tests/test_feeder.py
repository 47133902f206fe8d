"""The feeder fills the run up to its limit, each prompt once, stamped with the weights it needs."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from pipeline.config import QueueSettings, RedisSettings
from pipeline.feeder import Feeder, oldest_useful_version
from pipeline.keys import Keys, Stream
from pipeline.messages import PromptGroup, SamplingParams
from pipeline.prompts import Dataset, PromptOrder, PromptSource, Row
from pipeline.settings.files import load_config
from pipeline.streams import DropReason, Entry, Streams, connect
from pipeline.wire import decode

GROUPS_PER_STEP = 2


@pytest.fixture
async def streams(redis: Redis, keys: Keys) -> Streams:
    streams = Streams(redis, keys, QueueSettings(), consumer="feeder-test")
    await streams.open()
    return streams


def source(num_rows: int, *, epochs: int = 1) -> PromptSource:
    dataset = Dataset("test", [Row(number=i + 1, prompt=f"row {i}", columns={}) for i in range(num_rows)])
    order = PromptOrder(num_rows, seed=0, shuffle=False, epochs=epochs)
    sampling = SamplingParams(group_size=2, max_tokens=4)
    return PromptSource(
        dataset, order, encode=lambda prompt: list(str(prompt).encode()), sampling=sampling, max_prompt_tokens=100
    )


def feeder(streams: Streams, prompts: PromptSource, *, max_staleness: int = 1) -> Feeder:
    return Feeder(streams, prompts, groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness)


async def claim_prompts(streams: Streams, count: int) -> list[PromptGroup]:
    leases = await streams.claim(Stream.PROMPTS, count, block_s=0.0)
    return [decode(lease.payload, PromptGroup) for lease in leases]


@given(version=st.integers(0, 50), ahead=st.integers(0, 40), per_step=st.integers(1, 8), bound=st.integers(0, 8))
def test_oldest_useful_weights_keep_the_bound_when_groups_are_trained_in_order(
    version: int, ahead: int, per_step: int, bound: int
) -> None:
    oldest = oldest_useful_version(version, ahead, groups_per_step=per_step, max_staleness=bound)
    assert 0 <= oldest <= version
    assert oldest >= version - bound
    if ahead < (bound + 1) * per_step:  # what admission lets live
        assert version + ahead // per_step - oldest <= bound


async def test_never_more_groups_are_live_than_the_limit(streams: Streams) -> None:
    feed = feeder(streams, source(10))
    assert await feed.top_up(version=0, limit=lambda: 4) == 4
    assert await feed.top_up(version=0, limit=lambda: 4) == 0
    leases = await streams.claim(Stream.PROMPTS, 3, block_s=0.0)
    await streams.drop(leases, DropReason.STALE)
    assert await feed.top_up(version=1, limit=lambda: 4) == 3
    ledger = await streams.ledger()
    assert (ledger.fed, ledger.live) == (7, 4)
    assert feed.cursor == 7


async def test_a_feeder_that_is_broken_off_while_it_feeds_leaves_out_no_group(streams: Streams) -> None:
    """As when a trainer drains, or dies with its feeder waiting for Redis: the next one goes on from the cursor."""
    cursor = 0
    for turns in range(8):
        prompts = source(100)
        prompts.cursor = first = max(cursor, (await streams.ledger()).next_ordinal)
        feed = feeder(streams, prompts)
        feeding = asyncio.create_task(feed.top_up(version=0, limit=lambda: 4 * (turns + 1)))  # noqa: B023
        while prompts.cursor == first:  # noqa: ASYNC110 - taking groups sets no event
            await asyncio.sleep(0)
        assert feed.cursor == first, "they are taken, and nobody knows that they are fed"
        for _ in range(turns):
            await asyncio.sleep(0)
        feeding.cancel()
        await asyncio.wait([feeding])
        cursor = feed.cursor
    prompts.cursor = max(cursor, (await streams.ledger()).next_ordinal)
    assert await feeder(streams, prompts).top_up(version=0, limit=lambda: 100) > 0
    fed = [group.ordinal for group in await claim_prompts(streams, 100)]
    assert fed == list(range(len(fed)))


async def test_a_step_that_is_done_while_the_feeder_looks_makes_room_for_no_group_that_none_is_left_to_train(
    streams: Streams, valkey_url: str, keys: Keys
) -> None:
    config = load_config(
        [], environ={}, overrides=["trainer.max_steps=2", f"trainer.groups_per_step={GROUPS_PER_STEP}"]
    )
    step = 0
    # Its connection is yet to be made, so that it looks at the ledger after the step below.
    slow = connect(RedisSettings(), valkey_url)
    prompts = source(10)
    await feeder(streams, prompts).top_up(version=0, limit=lambda: 4)
    feed = feeder(Streams(slow, keys, QueueSettings(), consumer="feeder-test-2"), prompts)
    looking = asyncio.create_task(feed.top_up(version=0, limit=lambda: config.admission_limit_at(step)))
    await asyncio.sleep(0)
    step = 1
    await streams.drop(await streams.claim(Stream.PROMPTS, GROUPS_PER_STEP, block_s=0.0), DropReason.STALE)
    await looking
    assert (await streams.ledger()).live == GROUPS_PER_STEP
    await slow.aclose()


async def test_prompts_come_in_order_and_end_with_the_data(streams: Streams) -> None:
    feed = feeder(streams, source(3, epochs=2))
    assert await feed.top_up(version=0, limit=lambda: 100) == 6
    assert feed.has_ended
    prompts = await claim_prompts(streams, 100)
    assert [prompt.group_id for prompt in prompts] == [f"{ordinal:08d}" for ordinal in range(6)]
    assert [prompt.epoch for prompt in prompts] == [0, 0, 0, 1, 1, 1]


async def test_prompts_further_back_in_the_queue_need_newer_weights(streams: Streams) -> None:
    await feeder(streams, source(4)).top_up(version=5, limit=lambda: 4)
    prompts = await claim_prompts(streams, 4)
    assert [prompt.fed_version for prompt in prompts] == [5, 5, 5, 5]
    # The first two are trained at version 5, the next two at 6: with a bound of 1 from 4 and 5 on.
    assert [prompt.min_version for prompt in prompts] == [4, 4, 5, 5]


async def test_groups_whose_effect_was_lost_go_before_new_ones_and_under_their_own_ids(streams: Streams) -> None:
    feed = feeder(streams, source(6))
    await feed.top_up(version=0, limit=lambda: 2)
    leases = await streams.claim(Stream.PROMPTS, 2, block_s=0.0)
    for stream in (Stream.ROLLOUTS, Stream.SCORED):
        for lease in leases:
            entry = Entry(group_id=lease.group_id, weight_version=0, payload=lease.payload)
            await streams.hand_over(lease, entry, stream)
        leases = await streams.claim(stream, 2, block_s=0.0)
    await streams.finish_training(leases, {lease.group_id: lease.payload for lease in leases})
    lost = [decode(payload, PromptGroup) for payload in (await streams.uncommitted()).values()]

    prompts_left = source(6)
    prompts_left.cursor = (await streams.ledger()).next_ordinal
    resumed = feeder(streams, prompts_left)
    resumed.feed_again(lost)
    assert not resumed.has_ended
    assert await resumed.top_up(version=3, limit=lambda: 3) == 2
    assert await resumed.top_up(version=3, limit=lambda: 3) == 1
    prompts = await claim_prompts(streams, 10)
    assert [prompt.group_id for prompt in prompts] == ["00000000", "00000001", "00000002"]
    assert [prompt.fed_version for prompt in prompts] == [3, 3, 3]
    ledger = await streams.ledger()
    assert ledger.balances
    assert (ledger.fed, ledger.trained, ledger.uncommitted) == (3, 0, 0)


async def test_a_dropped_prompt_that_is_fed_again_is_a_new_group(streams: Streams) -> None:
    feed = feeder(streams, source(1))
    await feed.top_up(version=0, limit=lambda: 4)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0.0)
    again = feed.again([decode(lease.payload, PromptGroup)], version=7)
    await streams.drop([lease], DropReason.STALE, refeed=again)
    (prompt,) = await claim_prompts(streams, 4)
    assert prompt.group_id == "00000000+"
    assert (prompt.fed_version, prompt.min_version) == (7, 7)
    ledger = await streams.ledger()
    assert ledger.balances
    assert (ledger.fed, ledger.num_dropped, ledger.live) == (2, 1, 1)
