"""What is said of a run: what limits it, as text, as JSON and as gauges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from pipeline.config import QueueSettings, RedisSettings
from pipeline.embedded import EmbeddedServer
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.messages import Json
from pipeline.queues.accounts import Accounts
from pipeline.queues.connection import connect
from pipeline.queues.leases import Death
from pipeline.queues.ledger import Depth
from pipeline.roster import RunFacts
from pipeline.run.metrics import RunCollector
from pipeline.run.status import in_use
from pipeline.status import Limit, collect, limit_line, limiting_stage, render
from pipeline.streams import Entry, Streams
from pipeline.worker.state import WorkerState
from tests.refusing import break_, mend
from tests.run_states import depths, everyone, limit, worker
from tests.test_fleet import make_silent


def test_without_workers_the_run_is_over_or_blocked() -> None:
    assert limit(depths(), [], stop_reason="all steps are done") == Limit(
        stage=None, reason="the run is over: all steps are done"
    )
    assert limit(depths(), [], run_id=None).reason == "nobody has joined this run"
    stopped = limit(depths(3), [])
    assert stopped.is_blocked
    assert stopped.reason == (
        "no worker is alive, and the run is not over: started again, it goes on from its last checkpoint"
    )


def test_a_pause_is_named_with_the_way_out() -> None:
    found = limit(depths(3), everyone(), is_paused=True)
    assert (found.stage, found.is_blocked) == ("control", True)
    assert "resume" in found.reason


async def test_a_pause_is_no_blockade(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    await Fleet(redis, keys).pause()
    said = render(await collect(redis, keys)).splitlines()
    assert said[1] == "the run is paused; `rollstream resume` goes on"
    assert "BLOCKED" not in "".join(said)


def test_a_step_that_is_done_is_told_at_once_and_not_with_the_next_heartbeat() -> None:
    state = WorkerState("trainer", "trainer-a")
    told = []
    for fields in ({"step": 0}, {"step": 0, "reward_mean": 0.5}, {"weight_version": 1}, {"step": 1}):
        state.changed.clear()
        state.note(fields)
        told.append(state.changed.is_set())
    assert told == [True, False, False, True]


async def test_step_and_version_are_those_of_one_word_of_the_trainer(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    fleet = Fleet(redis, keys)
    await fleet.set_version(14)
    assert (await collect(redis, keys)).weight_version == 14, "it has not said which it has"
    await fleet.register(worker("trainer", step=12, weight_version=12))
    status = await collect(redis, keys)
    assert (status.step, status.weight_version) == (12, 12)


@pytest.mark.parametrize("role", ["generator", "scorer", "trainer"])
def test_a_missing_stage_blocks(role: str) -> None:
    others = [worker(other) for other in ("generator", "scorer", "trainer") if other != role]
    found = limit(depths(4, 4, 4), [*others, worker(role, is_alive=False), worker("exporter")])
    assert (found.stage, found.is_blocked) == (role, True)
    assert found.reason.startswith(f"no {role} is alive (1 lost); 4 groups wait in")


def test_why_the_last_trainer_failed_is_said_on_every_machine() -> None:
    found = limit(depths(4), [worker("generator"), worker("scorer")], failures={"trainer": "the disk is full"})
    assert found.reason == "no trainer is alive; the last one failed: the disk is full"


def test_generators_that_all_wait_for_weights_are_named() -> None:
    workers = [
        worker("generator", waiting_for="weights of version 3", wait_cause="weights"),
        worker("scorer"),
        worker("trainer"),
    ]
    found = limit(depths(8), workers)
    assert (found.stage, found.is_blocked) == ("weights", False)
    assert "8 groups wait in prompts" in found.reason
    stuck = [worker(seen.role, **{**seen.status, "progress_age_s": 90}) for seen in workers]
    assert limit(depths(8), stuck).is_blocked


def test_a_wait_for_the_last_evaluation_is_no_wait_for_weights() -> None:
    ending = worker("trainer", waiting_for="evaluation of the final weights", wait_cause="other")
    assert limit(depths(0, 0, 3), [*everyone()[:2], ending]).stage == "trainer"


def test_one_generator_that_waits_while_another_works_limits_nothing() -> None:
    workers = [worker("generator", waiting_for="weights", wait_cause="weights"), *everyone()]
    assert limit(depths(8, 1), workers).stage == "generator"


def test_trainer_that_starts_is_waited_for() -> None:
    workers = [*everyone()[:2], worker("trainer", ready=False, waiting_for="its model to load", wait_cause="other")]
    assert limit(depths(), workers).reason == "the trainer waits for its model to load"


def test_stage_that_holds_groups_and_moves_none_is_named() -> None:
    found = limit(depths(2, 5, 0, pending=9), everyone(progress_age_s=90))
    assert (found.stage, found.is_blocked) == ("scorer", True)
    assert "holds 5 groups of rollouts" in found.reason


def test_a_trainer_that_has_a_part_of_a_batch_does_not_hide_the_scorer_whose_reward_hangs() -> None:
    generator, scorer, trainer = everyone(progress_age_s=60)
    workers = [
        generator,
        worker("scorer", **{**scorer.status, "in_reward": "judge", "in_reward_s": 58.0}),
        worker("trainer", **{**trainer.status, "waiting_for": "scored groups", "wait_cause": "groups"}),
    ]
    found = limit(depths(0, 5, 2, pending=9), workers)
    assert (found.stage, found.is_blocked) == ("scorer", True)
    assert found.reason.endswith("; the reward judge has not returned for 58 s")


@pytest.mark.parametrize(("role", "stream"), [("teacher", "to_teach"), ("judge", "to_judge")])
def test_a_model_that_does_not_answer_is_named_with_its_setting_and_for_how_long(role: str, stream: str) -> None:
    asking = worker(role, progress_age_s=60, in_reward="big", in_reward_s=61.0)
    found = limit(depths(pending=4, **{stream: 4}), [*everyone(progress_age_s=60), asking])
    assert (found.stage, found.is_blocked) == (role, True)
    assert f"holds 4 groups of {stream}" in found.reason
    assert found.reason.endswith(f"; big of scoring.{role}s has not answered for 61 s")


def test_trainer_that_feeds_nothing_is_named() -> None:
    found = limit(depths(), everyone(progress_age_s=90))
    assert (found.stage, found.is_blocked) == ("trainer", True)


def test_a_trainer_in_the_middle_of_a_long_step_blocks_nothing() -> None:
    busy = worker("trainer", progress_age_s=300, busy_with="an optimiser step", busy_s=290.0)
    others = [
        worker("generator", progress_age_s=300, waiting_for="weights of version 3", wait_cause="weights"),
        worker("scorer"),
    ]
    others = [worker(seen.role, **{**seen.status, "progress_age_s": 300}) for seen in others]
    found = limit(depths(2, 0, 4, pending=4), [*others, busy])
    assert not found.is_blocked
    found = limit(depths(0, 0, 4, pending=4), [worker(seen.role, progress_age_s=300) for seen in others] + [busy])
    assert found == Limit(stage="trainer", reason="the trainer has been busy with an optimiser step for 290 s")


@pytest.mark.parametrize("held", [0, 3])
def test_groups_that_all_die_are_named_with_the_last_reason(held: int) -> None:
    losing = worker("trainer", dead_in_step=9, dropped_in_step=1, held=held, groups_per_step=8)
    workers = [worker("generator"), worker("scorer"), losing]
    death = Death(stream=Stream.ROLLOUTS, reason="the payload is too large")
    found = limiting_stage(depths(8, 2), workers, RunFacts(at=0.0, run_id="x"), death)
    assert (found.stage, found.is_blocked) == ("scorer", held == 0)
    assert found.reason.startswith(f"9 groups died since the last step, and {held} of 8 groups for the next step")
    assert "the last died in rollouts: the payload is too large" in found.reason


def test_groups_that_are_all_filtered_are_named() -> None:
    losing = worker("trainer", dead_in_step=0, dropped_in_step=64, held=1, groups_per_step=8)
    found = limit(depths(8, 2), [worker("generator"), worker("scorer"), losing])
    assert (found.stage, found.is_blocked) == ("scorer", False)
    assert found.reason.startswith("64 groups were filtered since the last step")


def test_a_few_that_die_on_the_way_are_nothing_to_speak_of() -> None:
    few = worker("trainer", dead_in_step=3, dropped_in_step=4, held=1, groups_per_step=8)
    assert "since the last step" not in limit(depths(8, 2), [worker("generator"), worker("scorer"), few]).reason


@pytest.mark.parametrize(("streams", "stage"), [(depths(20, 2), "generator"), (depths(2, 20), "scorer")])
def test_before_the_first_step_the_fuller_queue_shows_the_slowest(streams: Mapping[Stream, Depth], stage: str) -> None:
    found = limit(streams, everyone())
    assert (found.stage, found.is_blocked) == (stage, False)
    assert "no step is done yet" in found.reason


async def test_groups_that_a_lost_worker_holds_are_a_cause_of_their_own(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    lost = worker("generator", is_alive=False)
    streams = in_use(await Accounts(redis, keys, consumer="test").depths(), RunFacts(at=0.0))
    assert streams[Stream.PROMPTS].holders == {"scorer-a": 1}
    holder = replace(lost, worker_id="scorer-a")
    found = limit(streams, [*everyone(), holder])
    assert (found.stage, found.is_blocked) == ("generator", False)
    assert "scorer-a, lost, still holds 1 of 3 groups of prompts" in found.reason
    assert "queues.lease_s" in found.reason
    busy = worker("trainer", limited_by="trainer", waited_ratio=0.0, pace_s=9.0)
    assert limit(streams, [*everyone()[:2], busy, holder]).stage == "trainer"


async def a_run(redis: Redis, keys: Keys) -> None:
    fleet, streams = Fleet(redis, keys), Streams(redis, keys, QueueSettings(), consumer="scorer-a")
    await streams.open()
    await fleet.join({"lora.rank": "0"})
    await fleet.set_version(12)
    await fleet.acquire_trainer("trainer-a", 30)
    said: dict[str, dict[str, Json]] = {
        "generator": {"tokens_per_s": 800.0, "weight_version": 11},
        "scorer": {},
        "trainer": {"step": 12, "reward_mean": 0.5, "tokens_per_s": 640.0, "staleness_mean": 1.25, "max_staleness": 2},
    }
    for role, status in said.items():
        await fleet.register(worker(role, **status))
    entries = [Entry(group_id=f"{ordinal:08d}", weight_version=12, payload=b"x") for ordinal in range(3)]
    await streams.feed(entries, limit=8)
    await streams.claim(Stream.PROMPTS, 1, block_s=1)


async def test_status_is_read_from_redis_alone(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    status = await collect(redis, keys)
    assert (status.step, status.reward_mean, status.weight_version) == (12, 0.5, 12)
    assert (status.tokens_per_s, status.generated_tokens_per_s) == (640.0, 800.0)
    assert (status.streams[Stream.PROMPTS].length, status.streams[Stream.PROMPTS].backlog) == (3, 2)
    assert (status.ledger.fed, status.ledger.live, status.ledger_balances) == (3, 3, True)
    assert [seen.role for seen in status.workers] == ["generator", "scorer", "trainer"]
    assert status.limit.stage == "generator"
    assert (status.redis_memory_bytes or 0) > 0
    assert json.loads(json.dumps(asdict(status)))["streams"]["prompts"]["length"] == 3


@pytest.mark.parametrize(("how", "word"), [("full", "maxmemory"), ("read-only", "primary")])
async def test_a_server_that_takes_no_writes_is_looked_at_and_named(how: str, word: str, keys: Keys) -> None:
    with EmbeddedServer.start() as server:
        async with connect(RedisSettings(), server.url) as redis:
            await a_run(redis, keys)
            await break_(redis, how)
            status = await collect(redis, keys)
            assert (status.limit.stage, status.limit.is_blocked, status.step) == ("redis", True, 12)
            assert "BLOCKED by redis: the server takes no writes, since it is" in limit_line(status)
            assert word in status.limit.reason
            await mend(redis, how)
            assert (await collect(redis, keys)).limit.stage != "redis"


async def test_the_last_word_of_a_trainer_that_is_lost_stays(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    await redis.delete(keys.trainer_lock)
    await make_silent(redis, keys, "trainer-a", 30)
    status = await collect(redis, keys)
    assert (status.trainer, status.step, status.reward_mean, status.tokens_per_s) == (None, 12, 0.5, None)


async def test_who_is_lost_and_who_passes_no_groups_on_has_no_rates(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    await Fleet(redis, keys).register(worker("exporter", groups_per_s=0.0))
    assert "800" in render(await collect(redis, keys)).partition("worker ")[2]
    await make_silent(redis, keys, "generator-a", 30)
    lines = [line.split() for line in render(await collect(redis, keys)).splitlines()]
    left = {line[0]: line[1:-3] for line in lines if line[-2:] == ["s", "ago"]}
    assert (left["exporter-a"], left["generator-a"]) == (["running"], ["LOST", "11"])


async def test_looking_at_a_run_that_does_not_exist_makes_nothing(redis: Redis, keys: Keys) -> None:
    status = await collect(redis, keys)
    assert (status.run_id, status.workers, status.ledger.fed) == (None, (), 0)
    assert [key async for key in redis.scan_iter(match=keys.pattern.encode())] == []
    assert "nobody has joined this run" in render(status)


async def test_text_names_the_limit_the_queues_the_ledger_and_the_workers(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    text = render(await collect(redis, keys))
    assert f"run {keys.run}  step 12  version 12  reward 0.500" in text
    assert "staleness 1.25 (bound 2)" in text
    assert "limited by generator: 3 groups are in prompts" in text
    assert "tokens/s in the last minute: 800 generated, 640 trained" in text
    assert "fed 3 = trained 0 + dropped 0 + dead 0 + live 3" in text
    assert "trainer-a" in text


async def test_gauges_show_the_run_and_departed_workers_vanish(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    registry, collector = CollectorRegistry(), RunCollector(keys.run)
    registry.register(collector)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"rollstream_{name}", {"run": keys.run, **labels})

    assert value("redis_up") == 0
    assert value("stream_length", stream="prompts") is None
    collector.show(await collect(redis, keys))
    assert value("redis_up") == 1
    assert value("stream_backlog", stream="prompts") == 2
    assert value("ledger", state="live") == 3
    assert value("limiting_stage", stage="generator") == 1
    assert value("blocked", stage="generator") == 0
    assert value("workers", role="scorer", state="running") == 1
    await Fleet(redis, keys).deregister("scorer-a")
    collector.show(await collect(redis, keys))
    assert value("workers", role="scorer", state="running") is None
    assert value("blocked", stage="scorer") == 1
