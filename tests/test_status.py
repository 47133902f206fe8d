"""What is said of a run: what limits it, as text, as JSON and as gauges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from pipeline.accounts import Accounts
from pipeline.config import QueueSettings
from pipeline.fleet import Fleet, WorkerInfo
from pipeline.keys import Keys, Stream
from pipeline.ledger import Depth
from pipeline.messages import Json
from pipeline.pace import Pace
from pipeline.roster import RunFacts
from pipeline.run_metrics import RunCollector
from pipeline.status import Limit, collect, limiting_stage, render
from pipeline.streams import Entry, Streams
from tests.groups import make_prompt, make_scored

RUNNING: dict[str, Json] = {"ready": True, "state": "running", "progress_age_s": 0.5, "idle_ratio": 0.5}


def depths(prompts: int = 0, rollouts: int = 0, scored: int = 0, *, pending: int = 0) -> dict[Stream, Depth]:
    lengths = dict(zip(Stream, (prompts, rollouts, scored), strict=True))
    return {
        stream: Depth(
            length=length,
            pending=min(pending, length),
            backlog=length - min(pending, length),
            oldest_pending_s=70.0,
            oldest_waiting_s=3.0,
        )
        for stream, length in lengths.items()
    }


def worker(role: str, *, is_alive: bool = True, **status: Json) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"{role}-a", role=role, host="h", pid=1, is_alive=is_alive, status={**RUNNING, **status}
    )


def everyone(**of_all: Json) -> list[WorkerInfo]:
    return [worker(role, **of_all) for role in ("generator", "scorer", "trainer")]


def limit(streams: Mapping[Stream, Depth], workers: list[WorkerInfo], **facts: object) -> Limit:
    return limiting_stage(streams, workers, RunFacts(at=0.0, **{"run_id": "x", **facts}))  # type: ignore[arg-type]


def test_without_workers_the_run_is_over_or_blocked() -> None:
    assert limit(depths(), [], stop_reason="all steps are done") == Limit(
        stage=None, reason="the run is over: all steps are done"
    )
    assert limit(depths(), [], run_id=None).reason == "nobody has joined this run"
    assert limit(depths(3), []).is_blocked


def test_a_pause_is_named_with_the_way_out() -> None:
    found = limit(depths(3), everyone(), is_paused=True)
    assert (found.stage, found.is_blocked) == ("control", True)
    assert "resume" in found.reason


@pytest.mark.parametrize("role", ["generator", "scorer", "trainer"])
def test_a_missing_stage_blocks(role: str) -> None:
    others = [worker(other) for other in ("generator", "scorer", "trainer") if other != role]
    found = limit(depths(4, 4, 4), [*others, worker(role, is_alive=False), worker("exporter")])
    assert (found.stage, found.is_blocked) == (role, True)
    assert found.reason.startswith(f"no {role} is alive (1 lost); 4 groups wait in")


def test_generators_that_all_wait_for_weights_are_named() -> None:
    workers = [worker("generator", waiting_for="weights of version 3"), worker("scorer"), worker("trainer")]
    found = limit(depths(8), workers)
    assert (found.stage, found.is_blocked) == ("weights", False)
    assert "8 groups wait in prompts" in found.reason
    stuck = [worker(seen.role, **{**seen.status, "progress_age_s": 90}) for seen in workers]
    assert limit(depths(8), stuck).is_blocked


def test_one_generator_that_waits_while_another_works_limits_nothing() -> None:
    workers = [worker("generator", waiting_for="weights"), *everyone()]
    assert limit(depths(8, 1), workers).stage == "generator"


def test_trainer_that_starts_is_waited_for() -> None:
    workers = [*everyone()[:2], worker("trainer", ready=False, waiting_for="its model to load")]
    assert limit(depths(), workers).reason == "the trainer waits for its model to load"


def test_stage_that_holds_groups_and_moves_none_is_named() -> None:
    found = limit(depths(2, 5, 0, pending=9), everyone(progress_age_s=90))
    assert (found.stage, found.is_blocked) == ("scorer", True)
    assert "holds 5 groups of rollouts" in found.reason


def test_trainer_that_feeds_nothing_is_named() -> None:
    found = limit(depths(), everyone(progress_age_s=90))
    assert (found.stage, found.is_blocked) == ("trainer", True)


@pytest.mark.parametrize(("streams", "stage"), [(depths(20, 2), "generator"), (depths(2, 20), "scorer")])
def test_before_the_first_step_the_fuller_queue_shows_the_slowest(streams: Mapping[Stream, Depth], stage: str) -> None:
    found = limit(streams, everyone())
    assert (found.stage, found.is_blocked) == (stage, False)
    assert "no step is done yet" in found.reason


def step_of(pace: Pace, *, waited_s: float, generation_s: float = 1.0, scoring_s: float = 1.0, at: float = 4.0) -> None:
    """A step of four seconds, whose groups came so slowly."""
    group = make_scored(make_prompt(), [1.0, 0.0])
    hops = {"fed": 100.0, "generated": 100.0 + generation_s, "scored": 100.0 + generation_s + scoring_s}
    pace.step([replace(group, hops=hops)], ended_at=at, wall_s=4.0, waited_s=waited_s)


@pytest.mark.parametrize(
    ("times", "stage"),
    [
        ({"waited_s": 2.0, "generation_s": 3.0}, "generator"),
        ({"waited_s": 2.0, "scoring_s": 3.0}, "scorer"),
        ({"waited_s": 0.2, "generation_s": 3.0}, "trainer"),
    ],
)
def test_the_limit_is_what_the_trainer_concluded_whatever_the_queues_hold_now(
    times: dict[str, float], stage: str
) -> None:
    pace = Pace()
    step_of(pace, **times)
    said = pace.describe()
    assert said["limited_by"] == stage
    for streams in (depths(20, 1, 1), depths(1, 20, 1), depths(1, 1, 20), depths()):
        found = limit(streams, [*everyone()[:2], worker("trainer", **said)])
        assert (found.stage, found.is_blocked) == (stage, False)
        assert "in the last 4 s the trainer waited" in found.reason


def test_one_odd_step_among_many_changes_no_limit() -> None:
    pace = Pace()
    for number in range(1, 11):
        step_of(pace, waited_s=0.0, at=4.0 * number)
    step_of(pace, waited_s=4.0, at=44.0)
    assert pace.describe()["limited_by"] == "trainer"
    assert pace.describe()["pace_s"] == 40.0


def test_the_first_step_waits_for_a_start_and_counts_only_while_there_is_no_other() -> None:
    pace = Pace()
    step_of(pace, waited_s=4.0)
    assert pace.describe()["waited_ratio"] == 1.0
    step_of(pace, waited_s=0.0, at=8.0)
    assert pace.describe()["waited_ratio"] == 0.0


def test_steps_of_more_than_a_minute_ago_are_forgotten() -> None:
    pace = Pace()
    for at, waited_s in ((0.0, 0.0), (4.0, 0.0), (70.0, 4.0), (74.0, 4.0)):
        step_of(pace, waited_s=waited_s, at=at)
    assert pace.describe()["waited_ratio"] == 1.0


def test_generators_that_wait_for_weights_are_named_where_generation_is_slowest() -> None:
    pace = Pace()
    step_of(pace, waited_s=2.0, generation_s=3.0)
    stale = worker("generator", idle_cause="stale_weights", idle_ratio=0.6)
    assert limit(depths(4), [stale, worker("scorer"), worker("trainer", **pace.describe())]).stage == "weights"
    assert limit(depths(4), [stale, *everyone()[:2], worker("trainer", **pace.describe())]).stage == "generator"


async def test_groups_that_a_lost_worker_holds_are_a_cause_of_their_own(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    lost = worker("generator", is_alive=False)
    streams = await Accounts(redis, keys, consumer="test").depths()
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
        "trainer": {"step": 12, "reward_mean": 0.5, "tokens_per_s": 640.0, "staleness_mean": 1.25},
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


async def test_looking_at_a_run_that_does_not_exist_makes_nothing(redis: Redis, keys: Keys) -> None:
    status = await collect(redis, keys)
    assert (status.run_id, status.workers, status.ledger.fed) == (None, (), 0)
    assert [key async for key in redis.scan_iter(match=keys.pattern.encode())] == []
    assert "nobody has joined this run" in render(status)


async def test_text_names_the_limit_the_queues_the_ledger_and_the_workers(redis: Redis, keys: Keys) -> None:
    await a_run(redis, keys)
    text = render(await collect(redis, keys))
    assert f"run {keys.run}  step 12  version 12  reward 0.500" in text
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
