"""A generator leaves in mid-sequence: others go on from what it had.

Scenarios E3 and E4.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pipeline.keys import Keys, Stream
from pipeline.learner.scripted import ScriptedLearner
from pipeline.messages import PartialGroup, RolloutGroup
from pipeline.streams import Entry
from pipeline.weights import WeightPublisher
from pipeline.wire import decode, encode
from tests.engines.test_interrupted import assert_goes_on
from tests.groups import make_prompt
from tests.integration.harness import SCRIPTED, Run, running
from tests.integration.processes import Worker

# A completion takes 100 seconds on a slow generator and a quarter of one on a quick one.
LENGTH, GROUP_SIZE, NUM_HELD = 1000, 4, 8
LONG = (
    *SCRIPTED,
    f"generation.scripted.length_mean={LENGTH}",
    f"generation.max_tokens={2 * LENGTH}",
    f"generation.group_size={GROUP_SIZE}",
    f"generation.max_num_seqs={GROUP_SIZE * NUM_HELD}",
    "staleness.max_staleness=1",
    "worker.drain_timeout_s=60.0",
)
SLOW, QUICK = "generation.scripted.tokens_per_s=10", "generation.scripted.tokens_per_s=4000"


class Weights:
    """Of the run, published by the test itself."""

    def __init__(self, run: Run, publisher: WeightPublisher) -> None:
        self._run, self._publisher = run, publisher
        self._learner = ScriptedLearner(run.config.trainer, run.config.staleness)

    async def publish(self, version: int) -> None:
        await self._run.fleet.set_version(version)
        self._publisher.publish(self._learner.export_weights(version))


@asynccontextmanager
async def generating(
    directory: Path, url: str, name: str, *settings: str, num_groups: int
) -> AsyncIterator[tuple[Run, Weights]]:
    """A run of generators alone, with groups that wait for them."""
    async with running(directory, url, name, *LONG, *settings) as run:
        publisher = WeightPublisher(run.config.weights)
        try:
            await run.fleet.set_endpoints(publisher.start())
            weights = Weights(run, publisher)
            await weights.publish(0)
            await feed(run, range(num_groups))
            yield run, weights
        finally:
            publisher.close()


async def feed(run: Run, numbers: range) -> None:
    """Prompts of these numbers."""
    prompts = [make_prompt(number, group_size=GROUP_SIZE, max_tokens=2 * LENGTH) for number in numbers]
    entries = [Entry(group_id=prompt.group_id, weight_version=0, payload=encode(prompt)) for prompt in prompts]
    assert await run.streams.feed(entries, limit=100) == len(numbers)


async def until_in_work(run: Run, generator: Worker, version: int = 0) -> str:
    """Until it has as many groups as it can take, and tokens of each. Returns its id."""
    (info,) = await run.until_ready(generator)

    async def is_generating() -> bool:
        said = await run.info(generator)
        assert said is not None
        tokens = int(str(said.status.get("tokens_generated", 0)))
        return (
            tokens > 20 * GROUP_SIZE * NUM_HELD
            and said.status.get("weight_version") == version
            and await run.num_held(info.worker_id) == NUM_HELD
        )

    await run.until(is_generating, "groups in mid-sequence")
    return info.worker_id


async def drained(run: Run, generator: Worker) -> dict[str, PartialGroup]:
    """End it; what it leaves, which is everything: it goes at once, and waits for no completion to end."""
    generator.signal(signal.SIGTERM)
    assert await run.until_exit(generator) == [0]
    (said,) = generator.events_named("left_for_others")
    assert (said["groups"], said["unfinished"]) == (NUM_HELD, NUM_HELD * GROUP_SIZE)
    return await partials_of(run)


async def partials_of(run: Run) -> dict[str, PartialGroup]:
    """What is kept of groups that were begun."""
    found = await run.redis.hgetall(Keys(run.config.run.name).partials)  # type: ignore[misc]
    return {group_id.decode(): decode(payload, PartialGroup) for group_id, payload in found.items()}


async def completed(run: Run, number: int) -> dict[str, RolloutGroup]:
    """The rollouts, once there are so many."""

    async def are_there() -> bool:
        return (await run.streams.depths())[Stream.ROLLOUTS].length == number

    await run.until(are_there, f"{number} rollouts")
    leases = await run.streams.claim(Stream.ROLLOUTS, number, block_s=0)
    return {lease.group_id: decode(lease.payload, RolloutGroup) for lease in leases}


async def assert_nothing_is_left(run: Run, num_groups: int) -> None:
    assert await run.redis.exists(Keys(run.config.run.name).partials) == 0
    ledger = await run.ledger()
    assert (ledger.fed, ledger.live, ledger.dead) == (num_groups, num_groups, 0)


async def test_a_drained_generator_is_gone_at_once_and_others_go_on_from_its_prefix(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with generating(tmp_path, valkey_url, run_name, num_groups=NUM_HELD) as (run, weights):
        first = run.start("generator", SLOW)
        await until_in_work(run, first)
        second = run.start("generator", SLOW)
        await feed(run, range(NUM_HELD, 2 * NUM_HELD))
        await until_in_work(run, second)
        left = await drained(run, first)
        assert len(left) == NUM_HELD
        assert await run.backlog(Stream.PROMPTS) == NUM_HELD
        (said,) = first.events_named("left_for_others")
        assert said["tokens"] == sum(partial.num_tokens for partial in left.values())

        await weights.publish(1)
        await until_in_work(run, second, version=1)
        heir = run.start("generator", QUICK)
        (info,) = await run.until_ready(heir)
        rollouts = await completed(run, NUM_HELD)
        assert {*rollouts} == {*left}
        assert await run.metric(heir, "rollstream_tokens_carried_total") == said["tokens"]
        # Of what the first had drawn nothing is drawn again.
        num_whole = sum(len(item) for rollout in rollouts.values() for item in rollout.completions)
        assert await run.metric(heir, "rollstream_tokens_out_total") == num_whole - said["tokens"]
        more = await drained(run, second)
        assert len(more) <= NUM_HELD  # the heir may have taken some of them up already
        rollouts |= await completed(run, 2 * NUM_HELD)
        for group_id, partial in left.items():
            assert rollouts[group_id].generator == info.worker_id
            assert_goes_on(partial, rollouts[group_id].completions)
            for index, completion in enumerate(rollouts[group_id].completions):
                spans = [(span.weight_version, span.first_token) for span in completion.spans]
                assert spans == [(0, 0), (1, len(partial.unfinished[index]))]
        await assert_nothing_is_left(run, 2 * NUM_HELD)


async def test_of_a_killed_generator_only_what_was_not_saved_yet_is_generated_again(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = "generation.save_every_tokens=16"
    async with generating(tmp_path, valkey_url, run_name, settings, num_groups=NUM_HELD) as (run, weights):
        killed = run.start("generator", SLOW)
        await until_in_work(run, killed)

        async def is_saved() -> bool:
            saved = (await partials_of(run)).values()
            return len(saved) == NUM_HELD and all(partial.num_tokens >= 32 * GROUP_SIZE for partial in saved)

        await run.until(is_saved, "a second time at which all groups are saved")
        killed.signal(signal.SIGSTOP)
        left = await partials_of(run)
        num_saved = sum(partial.num_tokens for partial in left.values())
        killed.kill()
        await weights.publish(1)
        heir = run.start("generator", QUICK)
        rollouts = await completed(run, NUM_HELD)
        num_whole = 0
        for group_id, partial in left.items():
            assert_goes_on(partial, rollouts[group_id].completions)
            for index, completion in enumerate(rollouts[group_id].completions):
                num_whole += len(completion)
                spans = [(span.weight_version, span.first_token) for span in completion.spans]
                assert spans == [(0, 0), (1, len(partial.unfinished[index]))]
        # Nothing of what had been saved was generated again.
        assert await run.metric(heir, "rollstream_tokens_carried_total") == num_saved
        assert await run.metric(heir, "rollstream_tokens_out_total") == num_whole - num_saved
        await assert_nothing_is_left(run, NUM_HELD)


async def test_a_generator_that_is_killed_before_it_has_saved_anything_leaves_nothing(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = "generation.save_every_tokens=0"
    async with generating(tmp_path, valkey_url, run_name, settings, num_groups=NUM_HELD) as (run, weights):
        killed = run.start("generator", SLOW)
        await until_in_work(run, killed)
        killed.kill()
        await weights.publish(1)
        heir = run.start("generator", QUICK)
        for rollout in (await completed(run, NUM_HELD)).values():
            assert {span.weight_version for item in rollout.completions for span in item.spans} == {1}
        assert await run.metric(heir, "rollstream_tokens_carried_total") == 0
        await assert_nothing_is_left(run, NUM_HELD)


async def test_a_partial_that_is_broken_or_of_another_prompt_is_told_and_not_used(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with generating(tmp_path, valkey_url, run_name, num_groups=NUM_HELD) as (run, weights):
        first = run.start("generator", SLOW)
        await until_in_work(run, first)
        left = await drained(run, first)
        broken, other, whole, *_ = left
        key = Keys(run.config.run.name).partials
        payload = await run.redis.hget(key, broken)  # type: ignore[misc]
        await run.redis.hset(key, broken, payload[:-40])  # type: ignore[misc]
        await run.redis.hset(key, other, encode(left[whole]))  # type: ignore[misc]
        await weights.publish(1)
        heir = run.start("generator", QUICK)
        rollouts = await completed(run, NUM_HELD)
        assert {event["group_id"] for event in heir.events_named("partial_refused")} == {broken, other}
        assert all(event["level"] == "warning" for event in heir.events_named("partial_refused"))
        for group_id in (broken, other):
            assert [item.spans[0].weight_version for item in rollouts[group_id].completions] == [1] * GROUP_SIZE
        assert_goes_on(left[whole], rollouts[whole].completions)
        wasted = await run.metric(heir, "rollstream_tokens_wasted_total", reason="mismatch")
        assert wasted == left[whole].num_tokens
        await assert_nothing_is_left(run, NUM_HELD)


async def test_what_would_be_dropped_for_its_age_is_generated_afresh(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = "staleness.policy='drop'"
    async with generating(tmp_path, valkey_url, run_name, settings, num_groups=NUM_HELD) as (run, weights):
        first = run.start("generator", SLOW)
        await until_in_work(run, first)
        left = await drained(run, first)
        await weights.publish(2)
        heir = run.start("generator", QUICK)
        for rollout in (await completed(run, NUM_HELD)).values():
            assert {span.weight_version for item in rollout.completions for span in item.spans} == {2}
        wasted = await run.metric(heir, "rollstream_tokens_wasted_total", reason="stale")
        assert wasted == sum(partial.num_tokens for partial in left.values())
        await assert_nothing_is_left(run, NUM_HELD)
