"""What an autoscaler decides, case by case, and that it does so in a real run."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import pytest
from redis.asyncio import Redis

from pipeline.config import AutoscaleSettings, QueueSettings
from pipeline.errors import ConfigError
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.local.autoscale import IdleClock, Sample, Signals, Stage, decide, signals_of
from pipeline.local.autoscaler import Autoscaler, slots_of
from pipeline.scaling import GENERATOR, JUDGE, SCORER, Scaling
from pipeline.settings.files import load_config
from pipeline.streams import Streams

SETTINGS = AutoscaleSettings(max_generators=8, max_scorers=6)
CALM = Stage(num_ours=2, num_ready=2, num_workers=2, slots=8.0, waiting=0, in_work=15.0)


def signals(
    idle: float | None,
    generators: Stage = CALM,
    scorers: Stage = CALM,
    *,
    window_s: float = 30.0,
    since_change_s: float = 99.0,
) -> Signals:
    stages = {GENERATOR: generators, SCORER: scorers}
    return Signals(trainer_idle_ratio=idle, window_s=window_s, since_change_s=since_change_s, stages=stages)


def stage(number: int = 2, **changes: float) -> Stage:
    fields = {"num_ours": number, "num_ready": number, "num_workers": number, **changes}
    return dataclasses.replace(CALM, **fields)  # type: ignore[arg-type]


# Name: what is seen, what is decided.
CASES: Mapping[str, tuple[Signals, dict[str, int]]] = {
    "the trainer waits a little more than it may": (signals(0.11, stage(waiting=9)), {GENERATOR: 3}),
    "it waits half of the time: twice as many": (signals(0.5, stage(waiting=99)), {GENERATOR: 4}),
    "it waits nearly always: twice as many and no more": (signals(0.98, stage(waiting=99)), {GENERATOR: 4}),
    "no more than would find something to do": (signals(0.75, stage(4, waiting=9)), {GENERATOR: 6}),
    "no more than are allowed": (signals(0.5, stage(6, waiting=99)), {GENERATOR: 8}),
    "all that are allowed are there": (signals(0.5, stage(8, waiting=99)), {}),
    "groups wait for scorers": (signals(0.5, stage(waiting=3), stage(waiting=20)), {SCORER: 4}),
    "nothing waits for a worker: more would change nothing": (signals(0.9), {}),
    "some have yet to begin": (signals(0.9, stage(waiting=9, num_ready=1)), {}),
    "workers of other machines count, and stay": (
        signals(0.5, stage(waiting=99, num_ours=1, num_workers=4, num_ready=4)),
        {GENERATOR: 5},
    ),
    "there is none": (signals(0.9, stage(0, waiting=9)), {GENERATOR: 1}),
    "between the two bounds nothing changes": (signals(0.05, stage(4, in_work=1.0)), {}),
    "one fewer could do it": (signals(0.0, stage(4, in_work=18.0)), {GENERATOR: 3}),
    "one fewer would be too busy": (signals(0.0, stage(4, in_work=20.0)), {}),
    "groups wait for one: none leaves": (signals(0.0, stage(4, in_work=1.0, waiting=1)), {}),
    "of both stages": (signals(0.0, stage(3, in_work=1.0), stage(2, in_work=1.0)), {GENERATOR: 2, SCORER: 1}),
    "the last one stays": (signals(0.0, stage(1, in_work=0.0), stage(1, in_work=0.0)), {}),
    "those that others run do not leave for us": (signals(0.0, stage(num_ours=1, in_work=0.0)), {}),
    "the numbers have just changed": (signals(0.9, stage(waiting=9), since_change_s=59), {}),
    "it has not been watched for long": (signals(0.9, stage(waiting=9), window_s=29), {}),
    "no step was done yet": (signals(None, stage(waiting=9)), {}),
    "more than are allowed leave at once": (signals(None, stage(11), since_change_s=0), {GENERATOR: 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_decided(case: str) -> None:
    seen, expected = CASES[case]
    decisions = decide(seen, SETTINGS)
    assert {decision.role: decision.number for decision in decisions} == expected
    assert all(decision.reason for decision in decisions)


def test_numbers_below_the_least_are_raised() -> None:
    least = AutoscaleSettings(min_generators=3, min_scorers=2)
    assert [(found.role, found.number) for found in decide(signals(None), least)] == [(GENERATOR, 3)]


def sample(at: float, idle_s: float | None, waiting: int, in_work: int, *, trainer: str = "t") -> Sample:
    return Sample(
        at=at,
        trainer=trainer,
        idle_s=idle_s,
        waiting={GENERATOR: waiting},
        in_work={GENERATOR: in_work},
        num_ready={GENERATOR: 2},
        num_workers={GENERATOR: 3},
    )


def test_samples_become_the_fewest_that_waited_and_the_mean_in_work() -> None:
    samples = [sample(10, 100.0, 5, 8), sample(15, 101.0, 3, 4), sample(20, 104.0, 9, 6)]
    found = signals_of(samples, {GENERATOR: 1}, {GENERATOR: 4.0}, since_change_s=7)
    assert (found.trainer_idle_ratio, found.window_s, found.since_change_s) == (0.4, 10, 7)
    expected = Stage(num_ours=1, num_ready=2, num_workers=3, slots=4.0, waiting=3, in_work=6.0)
    assert found.stages == {GENERATOR: expected}


def test_a_wait_that_is_over_and_not_yet_counted_is_not_taken_back() -> None:
    clock = IdleClock()
    waiting = {"idle_s": 100.0, "waited_s": 40.0, "wait_cause": "groups"}
    in_step = {"idle_s": 100.0, "waited_s": 0.0, "wait_cause": None}
    counted = {"idle_s": 150.0, "waited_s": 0.0, "wait_cause": None}
    assert [clock.read("t", said) for said in (waiting, in_step, counted)] == [140, 140, 150]
    assert clock.read("t", {**counted, "waited_s": 30.0, "wait_cause": "redis"}) == 150
    assert clock.read("u", in_step) == 100, "another trainer"


def test_nothing_is_known_of_a_trainer_that_came_within_the_window() -> None:
    for first in (sample(10, 100.0, 1, 1, trainer="u"), sample(10, None, 1, 1), sample(20, 1.0, 1, 1)):
        found = signals_of([first, sample(20, 104.0, 1, 1)], {GENERATOR: 1}, {GENERATOR: 4.0}, since_change_s=7)
        assert found.trainer_idle_ratio is None


@pytest.mark.parametrize("setting", ["run.topology='colocated'", "generation.engine='openai'"])
def test_where_generators_would_only_wait_for_each_other_more_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"autoscale.max_generators = 4.*set it to 1"):
        load_config([], environ={}, overrides=["autoscale.enabled=true", setting])
    load_config([], environ={}, overrides=["autoscale.enabled=true", "autoscale.max_generators=1", setting])


def test_a_judge_behind_a_server_has_as_many_groups_in_work_as_its_requests_and_one_in_the_process_has_one() -> None:
    def of(*judges: str) -> float:
        overrides = ["generation.group_size=4", f"scoring.judges=[{','.join(judges)}]"]
        return slots_of(load_config([], environ={}, overrides=overrides))[JUDGE]

    here, fast, slow = (
        "{model='m'}",
        "{name='a',url='http://a',max_concurrency=16}",
        "{url='http://b',max_concurrency=2}",
    )
    assert (of(fast), of(slow, fast), of(here), of(fast, here)) == (4.0, 1.0, 1.0, 1.0)


async def test_who_left_a_run_that_is_over_or_paused_is_not_replaced(redis: Redis, keys: Keys) -> None:
    fleet, scaling, said = Fleet(redis, keys), Scaling(redis, keys), list[str]()
    await Streams(redis, keys, QueueSettings(), consumer="test").open()
    await scaling.keep("up", {GENERATOR: (0, 0), SCORER: (0, 0)}, ttl_s=60)
    config = load_config([], environ={}, overrides=["autoscale.window_s=0.1"])

    async def watched(until: asyncio.Event) -> None:
        looked = iter(range(3))

        def numbers() -> dict[str, int]:
            if next(looked, None) is None:
                until.set()
            return {GENERATOR: 0, SCORER: 0}

        watching = asyncio.create_task(Autoscaler(config, numbers, said.append).run(redis, keys, scaling))
        async with asyncio.timeout(180):
            await until.wait()
        watching.cancel()
        await asyncio.wait([watching])

    await fleet.stop("all steps are done")
    await watched(asyncio.Event())
    await redis.delete(keys.control)
    await fleet.pause()
    await watched(asyncio.Event())
    assert said == []
    await fleet.resume()
    await watched(asyncio.Event())
    assert said[0] == "autoscale: 0 -> 1 generators: the bounds are 1 and 4"
    assert await scaling.ask({SCORER: 1}) == {SCORER: 1}


async def hurried(redis: Redis, keys: Keys, answers: Iterable[dict[str, int]]) -> list[str]:
    """What an autoscaler without patience says until there are no more answers of how many workers there are."""
    await Streams(redis, keys, QueueSettings(), consumer="test").open()
    await Scaling(redis, keys).keep("up", {GENERATOR: (0, 0), SCORER: (0, 0)}, ttl_s=60)
    config = load_config([], environ={}, overrides=["autoscale.window_s=1e-6", "autoscale.cool_down_s=1e-6"])
    is_over, said, left = asyncio.Event(), list[str](), iter(answers)

    def numbers() -> dict[str, int]:
        if (answer := next(left, None)) is None:
            is_over.set()
        return answer or {}

    watching = asyncio.create_task(Autoscaler(config, numbers, said.append).run(redis, keys, Scaling(redis, keys)))
    async with asyncio.timeout(180):
        await is_over.wait()
    watching.cancel()
    await asyncio.wait([watching])
    return said


async def test_a_number_that_has_yet_to_be_carried_out_is_said_once(redis: Redis, keys: Keys) -> None:
    said = await hurried(redis, keys, itertools.repeat({GENERATOR: 0, SCORER: 0}, 60))
    assert [line.partition("s: the")[0] for line in said] == [
        "autoscale: 0 -> 1 generator",
        "autoscale: 0 -> 1 scorer",
    ]


async def test_an_up_that_begins_to_end_while_the_autoscaler_looks_is_left_alone(redis: Redis, keys: Keys) -> None:
    answers = itertools.chain([{GENERATOR: 0, SCORER: 0}], itertools.repeat(dict[str, int](), 20))
    assert await hurried(redis, keys, answers) == []


@pytest.mark.parametrize(
    "settings", [("autoscale.min_generators=5",), ("autoscale.trainer_idle_low=0.5", "autoscale.trainer_idle_high=0.4")]
)
def test_bounds_that_exclude_each_other_are_refused(settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"autoscale.*is above"):
        load_config([], environ={}, overrides=settings)
