"""Numbers of workers that people ask for reach the one `up` that answers, and are carried out once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.local.scaler import Scaler
from pipeline.local.supervisor import Supervisor, WorkerSpec
from pipeline.scaling import GENERATOR, SCORER, Scaling
from tests.conftest import Answer
from tests.test_supervisor import DRAINS, Watch, script

Ask = Callable[..., Answer]


async def test_a_request_reaches_the_up_that_answers_and_stays_until_it_is_taken_up(redis: Redis, keys: Keys) -> None:
    scaling = Scaling(redis, keys)
    assert await scaling.ask({GENERATOR: 3}) is None, "nobody answers"
    assert await scaling.keep("a", {GENERATOR: (1, 1), SCORER: (2, 2)}, ttl_s=30) == {GENERATOR: 1, SCORER: 2}
    assert await scaling.ask({GENERATOR: 3}) == {GENERATOR: 1}
    for _ in range(2):
        assert await scaling.keep("a", {GENERATOR: (1, 1), SCORER: (2, 2)}, ttl_s=30) == {GENERATOR: 3, SCORER: 2}
    assert await scaling.kept() == {GENERATOR: 1, SCORER: 2}
    await scaling.keep("a", {GENERATOR: (3, 3), SCORER: (2, 2)}, ttl_s=30)
    assert await scaling.kept() == {GENERATOR: 3, SCORER: 2}


async def test_a_number_that_falls_by_itself_gives_way_to_a_request(redis: Redis, keys: Keys) -> None:
    scaling = Scaling(redis, keys)
    await scaling.keep("a", {GENERATOR: (3, 3)}, ttl_s=30)
    assert await scaling.keep("a", {GENERATOR: (3, 2)}, ttl_s=30) == {GENERATOR: 2}
    await scaling.ask({GENERATOR: 5})
    assert await scaling.keep("a", {GENERATOR: (2, 1)}, ttl_s=30) == {GENERATOR: 5}


async def test_who_replaces_a_number_does_not_replace_one_that_a_person_asked_for_meanwhile(
    redis: Redis, keys: Keys
) -> None:
    scaling = Scaling(redis, keys)
    await scaling.keep("a", {GENERATOR: (2, 2)}, ttl_s=30)
    await scaling.ask({GENERATOR: 6})
    assert await scaling.ask({GENERATOR: 3}, instead_of={GENERATOR: 2}) == {GENERATOR: 6}
    assert await scaling.keep("a", {GENERATOR: (2, 2)}, ttl_s=30) == {GENERATOR: 6}
    assert await scaling.ask({GENERATOR: 5}, instead_of={GENERATOR: 6}) == {GENERATOR: 6}
    assert await scaling.keep("a", {GENERATOR: (6, 6)}, ttl_s=30) == {GENERATOR: 5}


async def test_a_request_is_heard_whatever_is_asked_for_after_it_and_not_by_one_that_left(
    redis: Redis, keys: Keys
) -> None:
    scaling = Scaling(redis, keys)
    await scaling.keep("a", {GENERATOR: (2, 2)}, ttl_s=30)
    await scaling.ask({GENERATOR: 2})
    assert not await scaling.is_heard()
    await scaling.keep("a", {GENERATOR: (2, 2)}, ttl_s=30)
    assert await scaling.is_heard()
    await scaling.ask({GENERATOR: 6})
    await scaling.ask({GENERATOR: 3}, instead_of={GENERATOR: 6})
    assert not await scaling.is_heard()
    await scaling.keep("a", {GENERATOR: (2, 2)}, ttl_s=30)
    assert await scaling.is_heard(), "though 6 was never kept"
    await scaling.ask({GENERATOR: 4})
    await scaling.leave("a")
    await scaling.keep("b", {GENERATOR: (1, 1)}, ttl_s=30)
    assert not await scaling.is_heard()


async def test_one_up_answers_until_it_leaves_or_is_silent(redis: Redis, keys: Keys) -> None:
    scaling = Scaling(redis, keys)
    await scaling.keep("a", {GENERATOR: (1, 1)}, ttl_s=30)
    assert await scaling.keep("b", {GENERATOR: (2, 2)}, ttl_s=30) is None
    await scaling.leave("b")
    assert await scaling.kept() == {GENERATOR: 1}
    await scaling.leave("a")
    assert await scaling.keep("b", {GENERATOR: (2, 2)}, ttl_s=30) == {GENERATOR: 2}
    assert 0 < await redis.pttl(keys.crew) <= 30_000


@pytest.fixture
async def crew(redis: Redis, keys: Keys) -> AsyncIterator[tuple[Watch, Supervisor, Scaling]]:
    """A supervisor with a trainer and one generator, and a scaler at work."""
    watch, scaling = Watch(), Scaling(redis, keys)

    def spec_of(role: str, index: int, number: int) -> WorkerSpec:
        return script(f"{role}-{index + 1}", DRAINS)

    specs = [spec_of(GENERATOR, 0, 1), script("trainer", DRAINS, ends_run=True)]
    supervisor = Supervisor(specs, drain_timeout_s=20, on_line=watch.on_line, on_exit=watch.on_exit)
    scaler = Scaler(supervisor, {GENERATOR: 1, SCORER: 0}, spec_of, lambda text: watch.on_line("up", text))
    run = asyncio.create_task(supervisor.run())
    await watch.until_said("ready", times=2)
    work = asyncio.create_task(scaler.run(scaling))
    await watch.until_condition(lambda: redis.exists(keys.crew))
    yield watch, supervisor, scaling
    work.cancel()
    await asyncio.wait([work])
    assert not await redis.exists(keys.crew), "it answers no longer"
    supervisor.stop()
    assert await run == 0


async def test_workers_are_added_under_free_names_and_the_last_are_let_go(
    crew: tuple[Watch, Supervisor, Scaling],
) -> None:
    watch, supervisor, scaling = crew
    await scaling.ask({GENERATOR: 3, SCORER: 1})
    await watch.until_said("ready", times=5)
    assert set(supervisor.staying) == {"trainer", "generator-1", "generator-2", "generator-3", "scorer-1"}
    await scaling.ask({GENERATOR: 1})
    await watch.until(lambda: watch.codes("generator-2") == watch.codes("generator-3") == [0])
    await scaling.ask({GENERATOR: 2})
    await watch.until_said("ready", times=6)
    assert [line for name, line in watch.lines if name == "up"] == [
        "generators: 1 -> 3",
        "scorers: 0 -> 1",
        "generators: 3 -> 1",
        "generators: 1 -> 2",
    ]


async def test_a_worker_that_leaves_by_itself_lowers_the_number(crew: tuple[Watch, Supervisor, Scaling]) -> None:
    watch, supervisor, scaling = crew
    await scaling.ask({GENERATOR: 2})
    await watch.until_said("ready", times=3)

    async def is_kept(number: int) -> bool:
        return (await scaling.kept())[GENERATOR] == number

    await watch.until_condition(lambda: is_kept(2))
    supervisor.let_go("generator-1")  # as a worker does that was drained by `rollstream drain`
    await watch.until_condition(lambda: is_kept(1))
    await scaling.ask({GENERATOR: 2})
    await watch.until_said("ready", times=4)
    assert set(supervisor.staying) == {"trainer", "generator-1", "generator-2"}


async def test_an_up_that_ends_has_no_numbers_to_change(crew: tuple[Watch, Supervisor, Scaling]) -> None:
    watch, supervisor, _ = crew
    scaler = Scaler(supervisor, {GENERATOR: 1, SCORER: 0}, lambda *_: script("x", DRAINS), lambda _: None)
    assert scaler.numbers == {GENERATOR: 1, SCORER: 0}
    supervisor.stop()
    assert scaler.numbers == {}
    await watch.until(lambda: watch.codes("trainer") == watch.codes("generator-1") == [0])


@pytest.mark.parametrize("words", ["generators", "generators=x", "trainers=2", "generators=-1", "generators=999", "=1"])
def test_a_request_that_makes_no_sense_is_refused(ask: Ask, words: str) -> None:
    answer = ask("scale", words)
    assert answer.code == 2
    assert words in answer.err


def test_a_number_of_more_digits_than_can_be_read_is_refused_in_one_short_line(ask: Ask) -> None:
    answer = ask("scale", "generators=" + "9" * 5000)
    assert answer.code == 2
    assert answer.err.startswith("error: 'generators=999")
    assert answer.err.endswith("...': at most 256 workers of one kind run on one machine\n")
    assert len(answer.err) < 200


def test_a_number_that_is_given_twice_is_refused(ask: Ask) -> None:
    assert "twice" in ask("scale", "scorers=1", "scorers=2").err


async def test_without_an_up_the_way_out_is_named(ask: Ask, redis: Redis, keys: Keys) -> None:
    assert (await asyncio.to_thread(ask, "scale", "generators=2")).code == 2, "no such run"
    await Fleet(redis, keys).join({"lora.rank": "0"})
    answer = await asyncio.to_thread(ask, "scale", "generators=2")
    assert (answer.code, answer.out) == (2, "")
    assert "no `up` of run" in answer.err
    assert "`rollstream up`" in answer.err


async def test_an_up_that_stands_still_is_told(
    ask: Ask, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Fleet(redis, keys).join({"lora.rank": "0"})
    await Scaling(redis, keys).keep("a", {GENERATOR: (1, 1)}, ttl_s=60)
    monkeypatch.setattr("pipeline.cli.control._PATIENCE_S", 0.2)
    answer = await asyncio.to_thread(ask, "scale", "generators=2")
    assert answer.code == 3
    assert "has not answered" in answer.err
