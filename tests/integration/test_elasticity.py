"""Workers come and go: any order of starting, more generators and fewer, more scorers.

Scenarios E1, E2, E6 and W1.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.keys import Keys, Stream
from pipeline.learner.scripted import ScriptedLearner
from pipeline.messages import RolloutGroup
from pipeline.streams import Entry
from pipeline.weights import WeightPublisher
from pipeline.wire import decode, encode
from tests.groups import make_prompt
from tests.integration.harness import SCRIPTED, Run, running
from tests.integration.processes import Worker

ORDERS = list(itertools.permutations(("generator", "scorer", "trainer")))
# What each role lacks until the last of the three has come.
LACKS = {
    "generator": ("a trainer that publishes weights", "groups on the stream of prompts"),
    "scorer": ("groups on the stream of rollouts",),
    "trainer": ("scored groups",),
}


async def until_registry_says_what_it_lacks(run: Run, worker: Worker) -> None:
    """For everyone to see."""

    async def says() -> bool:
        info = await run.info(worker)
        return info is not None and info.status["waiting_for"] in LACKS[worker.role]

    await run.until(says, f"word of what the {worker.role} waits for")


async def until_log_says_what_it_lacks(run: Run, worker: Worker) -> None:
    """In its own log; after how many seconds of waiting is in test_wait_log."""

    def says() -> bool:
        return any(event["waiting_for"] in LACKS[worker.role] for event in worker.events_named("waiting"))

    await run.until(says, f"a line of what the {worker.role} waits for")


async def test_workers_start_in_any_order_and_say_what_is_missing(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async def start_in(order: tuple[str, ...]) -> None:
        name = f"{run_name}-{'-'.join(order)}"
        async with running(tmp_path, valkey_url, name, *SCRIPTED, "trainer.max_steps=2") as run:
            *first, last = order
            for role in first:
                await until_registry_says_what_it_lacks(run, run.start(role))
            for worker in run.workers:
                await until_log_says_what_it_lacks(run, worker)
            assert (await run.ledger()).trained == 0
            run.start(last)
            await run.until_over()
            assert (await run.ledger()).trained == 8

    await asyncio.gather(*map(start_in, ORDERS))


async def until_rate(run: Run, num_groups: int, is_right: Callable[[float], bool], what: str) -> None:
    """Wait until so many groups in a row were trained at such a rate, in groups a second.

    Timers of generators and rewards bound the rate from above; a busy machine makes any rate lower, for a while.
    """
    since: dict[int, float] = {}  # groups trained -> when that was seen first

    async def has_rate() -> bool:
        now, trained = time.monotonic(), (await run.ledger()).trained
        since.setdefault(trained, now)
        before = [number for number in since if number <= trained - num_groups]
        return bool(before) and is_right((trained - max(before)) / (since[trained] - since[max(before)]))

    await run.until(has_rate, what)


async def test_throughput_follows_generators_that_come_and_go(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    # A generator makes one group after another, each in 0.8 s and never faster.
    most_of_one = 1 / 0.8
    settings = (
        "generation.scripted.tokens_per_s=20",
        "generation.max_num_seqs=4",
        "trainer.groups_per_step=2",
        "trainer.max_steps=100000",
        "staleness.max_staleness=8",
        "worker.heartbeat_s=0.2",
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        await run.until_trained(4)
        helpers = [run.start("generator") for _ in range(2)]
        await until_rate(run, 12, lambda rate: rate > 2 * most_of_one, "the rate of more than two generators")
        for helper in helpers:
            helper.signal(signal.SIGTERM)
        assert await run.until_exit(*helpers) == [0, 0]
        await until_rate(run, 4, lambda rate: rate < 1.2 * most_of_one, "the rate of one generator")
        await run.fleet.stop("the test is over")
        await run.until_over()
        ledger = await run.ledger()
        assert (ledger.dead, ledger.num_dropped) == (0, 0)
        assert set(run.times_trained.values()) == {1}


async def test_four_scorers_give_four_times_the_rate_of_one(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    settings = (
        "scoring.rewards=[{function='tests.integration.rewards:slow'}]",
        "generation.scripted.realtime=false",
        "staleness.max_staleness=8",
        "trainer.max_steps=100000",
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        await run.until_trained(4)
        for _ in range(3):
            run.start("scorer")
        # A scorer takes half a second for a group, and never less.
        await until_rate(run, 24, lambda rate: rate > 2.5 * 2, "the rate of more than two scorers")
        await run.fleet.stop("the test is over")
        await run.until_over()


@pytest.fixture
async def publisher(tmp_path: Path, valkey_url: str, run_name: str):
    """A run whose weights come from the test itself."""
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED) as run:
        publisher = WeightPublisher(run.config.weights)
        yield run, publisher
        publisher.close()


async def test_a_generator_makes_nothing_before_it_serves_weights_that_the_prompt_allows(
    publisher: tuple[Run, WeightPublisher],
) -> None:
    run, weights = publisher
    learner = ScriptedLearner(run.config.trainer, run.config.staleness)
    prompts = [make_prompt(ordinal, version=ordinal, min_version=ordinal) for ordinal in range(3)]
    entries = [Entry(group_id=p.group_id, weight_version=p.fed_version, payload=encode(p)) for p in prompts]
    assert await run.streams.feed(entries, limit=10) == 3
    generator = run.start("generator")
    await until_registry_says_what_it_lacks(run, generator)
    depths = await run.streams.depths()
    assert (depths[Stream.PROMPTS].backlog, depths[Stream.ROLLOUTS].length) == (3, 0)

    await run.fleet.set_endpoints(weights.start())
    for version in range(3):
        await run.fleet.set_version(version)
        weights.publish(learner.export_weights(version))

        async def are_there(number: int = version + 1) -> bool:
            return (await run.streams.depths())[Stream.ROLLOUTS].length == number

        await run.until(are_there, f"the group that version {version} is enough for")
    for lease in await run.streams.claim(Stream.ROLLOUTS, 3, block_s=0):
        rollout = decode(lease.payload, RolloutGroup)
        made_by = {span.weight_version for completion in rollout.completions for span in completion.spans}
        assert made_by == {rollout.prompt.min_version}
    generator.signal(signal.SIGTERM)
    await run.until_over()


async def test_generators_that_pass_weights_on_come_and_go(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    settings = (*SCRIPTED, "weights.relay=true", "weights.share_on_host=false", "trainer.scripted_step_s=0.05")
    async with running(tmp_path, valkey_url, run_name, *settings, "trainer.max_steps=100000") as run:
        run.start_all()
        others = [run.start("generator") for _ in range(2)]
        first = run.workers[0]

        async def relays() -> set[int]:
            return {info.pid for info in await run.fleet.workers() if info.is_alive and info.status.get("relay")}

        async def all_relay() -> bool:
            return await relays() == {worker.pid for worker in (first, *others)}

        await run.until(all_relay, "three relays")
        await run.until_steps(run.num_steps + 10)
        first.kill()
        killed_at = await run.fleet.version() or 0

        async def have_newer_weights() -> bool:
            return min([await run.metric(worker, "rollstream_weight_version") for worker in others]) > killed_at + 10

        await run.until(have_newer_weights, "weights from after the death of the first relay, at both others")
        assert (await run.ledger()).dead == 0


async def test_a_generator_of_a_run_whose_name_is_misspelled_says_which_run_it_waits_for_and_which_there_are(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED) as run:
        await run.fleet.join({"lora.rank": "0"})
        misspelled = run.start("generator", f"run.name='{run_name[:-1]}'")
        await run.until(lambda: misspelled.events_named("no_trainer_yet") != [], "word of the run that is meant")
        (said,) = misspelled.events_named("no_trainer_yet")
        assert said["run"] == run_name[:-1]
        assert run_name in said["similar_runs"]  # runs of other tests may be on the server, too
        assert {event["run"] for event in misspelled.events_named("waiting")} == {run_name[:-1]}
        misspelled.signal(signal.SIGTERM)
        assert await run.until_exit(misspelled) == [0]


async def test_an_address_of_the_weights_that_is_spoilt_is_put_back_by_the_trainer(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, "trainer.max_steps=3") as run:
        trainer = run.start("trainer")
        await run.until_ready(trainer)
        await run.redis.execute_command("HSET", Keys(run_name).meta, "endpoints", "here it is")
        run.start("generator")
        run.start("scorer")
        await run.until_over()
        assert trainer.events_named("weights_address_put_back") != []
