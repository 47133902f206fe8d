"""Groups that cannot be read, generated, scored or learned from, and data that ends: the run goes on or says why not.

Scenarios Q5 to Q11 and E5.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgpack
import numpy as np
import pytest

from pipeline.keys import Keys, Stream
from pipeline.messages import PromptGroup
from pipeline.prompts import Coverage, PromptStatistics
from pipeline.run.recovery import STATISTICS_FILE
from pipeline.run.resumption import run_checkpoints
from pipeline.status import Limit, collect
from pipeline.streams import Entry, Streams
from pipeline.wire import encode
from tests.groups import make_prompt, make_scored
from tests.integration.harness import SCRIPTED, Run, running

MAX_PAYLOAD_BYTES = 64 * 1024


def entry(group_id: str, payload: bytes | None = None) -> Entry:
    """A group that is fed by the test, beside those of the trainer."""
    return Entry(group_id=group_id, weight_version=0, payload=encode(prompt(group_id)) if payload is None else payload)


def prompt(group_id: str, num_tokens: int = 3) -> PromptGroup:
    """A prompt far away from those of the data set."""
    made = make_prompt(10_000, group_id=group_id, group_size=4)
    return dataclasses.replace(made, prompt_token_ids=np.arange(num_tokens, dtype=np.uint32))


def under_schema(version: int, payload: bytes) -> bytes:
    """The payload as another version of rollstream might have written it."""
    fields = msgpack.unpackb(payload)
    return bytes(msgpack.packb({**fields, "schema": version}))


async def put_behind_the_workers(run: Run, stream: Stream, group_id: str, payload: bytes) -> None:
    """Hand a group over to a later stream, as a worker gone wrong would."""
    saboteur = Streams(run.redis, Keys(run.config.run.name), run.config.queues, consumer="saboteur")
    assert await saboteur.feed([entry(group_id)], limit=1000) == 1
    found = False
    while not found:
        leases = await saboteur.claim(Stream.PROMPTS, 100, block_s=0)
        for lease in leases:
            if lease.group_id == group_id:
                await saboteur.hand_over(lease, entry(group_id, payload), stream)
                found = True
            else:
                await saboteur.release([lease])


async def test_groups_that_no_one_can_process_are_set_aside_with_the_reason_and_come_back_mended(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = (
        "trainer.max_steps=100000",
        "trainer.scripted_step_s=0.1",
        "model.max_context=128",
        f"queues.max_payload_bytes={MAX_PAYLOAD_BYTES}",
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        await run.until_steps(1)
        await run.fleet.pause()

        async def all_pause() -> bool:
            return all(info.status["state"] == "paused" for info in await run.fleet.workers())

        await run.until(all_pause, "a pause of all workers")
        good = encode(prompt("cut"))
        bad = [
            entry("random", bytes(range(256))),
            entry("cut", good[:-20]),
            entry("other-schema", under_schema(99, good)),
            entry("too-large", good + bytes(MAX_PAYLOAD_BYTES)),
            entry("no-room", encode(prompt("no-room", num_tokens=200))),
        ]
        assert await run.streams.feed(bad, limit=1000) == len(bad)
        await put_behind_the_workers(run, Stream.ROLLOUTS, "broken-rollout", b"no rollout")
        await put_behind_the_workers(run, Stream.ROLLOUTS, "wrong-stage", good)
        await put_behind_the_workers(run, Stream.SCORED, "broken-score", b"no score")
        future = make_scored(prompt("from-the-future"), [0.0, 1.0, 2.0, 3.0], version=10**6)
        await put_behind_the_workers(run, Stream.SCORED, "from-the-future", encode(future))
        await run.fleet.resume()

        async def all_dead() -> bool:
            return (await run.ledger()).dead == len(bad) + 4

        await run.until(all_dead, "dead letters")
        letters = {letter.group_id: letter for letter in await run.streams.dead_letters()}
        said = {
            "random": "msgpack",
            "cut": "msgpack",
            "other-schema": "schema version 99",
            "too-large": f"max_payload_bytes = {MAX_PAYLOAD_BYTES}",
            "no-room": "leaves nothing to generate in a context of 128",
            "broken-rollout": "msgpack",
            "wrong-stage": "expected 'rollout'",
            "broken-score": "msgpack",
            "from-the-future": "follows another trainer",
        }
        for group_id, words in said.items():
            assert words in letters[group_id].reason
        assert letters["no-room"].attempt == run.config.queues.max_attempts
        assert {letters[name].stream for name in ("broken-score", "from-the-future")} == {Stream.SCORED}

        async def all_are_counted() -> bool:  # by each worker, after the ledger
            stages = zip(run.workers, ("prompts", "rollouts", "scored"), strict=True)
            counts = [await run.metric(who, "rollstream_dead_letters_total", stage=stage) for who, stage in stages]
            return counts == [len(bad), 2, 2]

        await run.until(all_are_counted, "workers that count the dead letters of their stage")
        await run.until_steps(run.num_steps + 2)

        # Mended, it passes all stages. What is not mended dies again.
        assert (await run.command("streams", "dead-letters", "--save", str(tmp_path / "letters"))).code == 0
        (tmp_path / "mended.msgpack").write_bytes(good)
        letter = letters["cut"].letter_id
        assert (tmp_path / "letters" / f"{letter}.msgpack").read_bytes() == good[:-20]
        words = ("streams", "requeue", letter, "--payload", str(tmp_path / "mended.msgpack"))
        assert (await run.command(*words)).out == "1 put back\n"
        await run.until(lambda: run.times_trained["cut"] == 1, "training of the mended group")
        assert (await run.ledger()).dead == len(said) - 1
        await run.fleet.stop("the test is over")
        await run.until_over()


async def test_finite_data_ends_in_a_partial_batch_and_long_prompts_are_skipped(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    data = tmp_path / "data.jsonl"
    texts = ["the same"] * 8 + ["another", "a third"] + ["far too long " * 20] * 2
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    settings = (
        f"data.path={json.dumps(str(data))}",
        "data.epochs=1",
        "data.max_prompt_tokens=32",
        "trainer.max_steps=0",
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all(generators=2)
        await run.until_over()
        ledger = await run.ledger()
        assert (ledger.fed, ledger.trained, ledger.live) == (10, 10, 0)
        assert [row["groups"] for row in run.steps] == [4, 4, 2]
        assert run.steps[-1]["prompts_skipped"] == 2
        assert trainer.events_named("prompts_skipped")[0]["max_prompt_tokens"] == 32
        assert set(run.times_trained.values()) == {1}
        # Equal prompts are groups of their own, and no two get the same completion, whoever made it.
        completions = [item["text"] for sample in run.samples for item in sample["completions"]]
        assert len(set(completions)) == len(completions) == 40


@pytest.mark.parametrize("asked_by", ["algorithm.drop_zero_variance=true", "algorithm.preset=dapo"])
async def test_filtered_groups_are_replaced_as_long_as_some_are_left(
    tmp_path: Path, valkey_url: str, run_name: str, asked_by: str
) -> None:
    reward = "scoring.rewards=[{function='tests.integration.rewards:same_for_half'}]"
    settings = (reward, asked_by, "trainer.max_steps=5")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        await run.until_over()
        ledger = await run.ledger()
        assert ledger.trained == 20
        assert ledger.dropped.keys() == {"zero_variance"}
        assert all(len({item["reward"] for item in sample["completions"]}) == 4 for sample in run.samples)


async def test_groups_outside_the_range_are_replaced_and_prompts_are_known_by_what_they_earned(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abcdefgh"))
    settings = (
        f"data.path={json.dumps(str(data))}",
        "data.curriculum=true",
        "data.solved_reward=1.5",
        "scoring.rewards=[{function='tests.integration.rewards:same_for_half'}]",
        "algorithm.min_group_reward=1.25",
        "trainer.max_steps=5",
        "checkpoint.every_steps=2",
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        await run.until_over()
        ledger = await run.ledger()
        assert ledger.trained == 20
        assert ledger.dropped.keys() == {"out_of_range"}
        assert ledger.dropped["out_of_range"] >= 4, "half of the first pass"
        assert all(len({item["reward"] for item in sample["completions"]}) == 4 for sample in run.samples)
        last = Coverage.of(run.steps[-1])
        assert last == Coverage(in_data=8, seen=8, always_solved=4, sometimes_solved=4, never_solved=0)
        status = json.loads((await run.command("status", "--json")).out.splitlines()[-1])
        assert status["prompts"] == dataclasses.asdict(last)
        saved = run_checkpoints(run.config).latest()
        assert saved is not None
        statistics = PromptStatistics(8, solved_reward=1.5)
        statistics.restore(saved.attached(STATISTICS_FILE) or b"")
        assert statistics.coverage() == last


async def test_a_run_of_which_every_group_is_filtered_ends_with_the_reason(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    reward = "scoring.rewards=[{function='tests.integration.rewards:same'}]"
    settings = (reward, "algorithm.drop_zero_variance=true", "algorithm.max_refill=3")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start("generator")
        run.start("scorer")
        trainer = run.start("trainer", may_fail=True)
        assert await run.until_exit(trainer) == [2]
        (line,) = [line for line in trainer.output.splitlines() if line.startswith("error: ")]
        assert "zero_variance: " in line
        assert "algorithm.max_refill = 3" in line
        blocked = (await collect(run.redis, Keys(run_name))).limit.reason
        assert blocked.startswith("no trainer is alive")
        assert f"; the last one failed: {line.removeprefix('error: ')[:100]}" in blocked
        ledger = await run.ledger()
        assert (ledger.trained, ledger.num_dropped) == (0, ledger.dropped["zero_variance"])
        assert ledger.num_dropped >= 3 * 4


async def test_a_run_whose_rewards_all_fail_ends_with_the_error_of_the_reward(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    reward = "scoring.rewards=[{function='tests.integration.rewards:always_raises'}]"
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, reward, "algorithm.max_refill=3") as run:
        run.start("generator")
        run.start("scorer")
        trainer = run.start("trainer", may_fail=True)
        assert await run.until_exit(trainer) == [2]
        (line,) = [line for line in trainer.output.splitlines() if line.startswith("error: ")]
        assert "The last reward error: always_raises: KeyError: 'solution' (" in line
        assert "unscored: " in line
        assert "too easy" not in line
        assert "dead-letters" not in line


async def test_a_reward_that_fails_for_some_prompts_shows_in_every_line_that_it_touches(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", "c")))
    settings = (
        "scoring.rewards=[{function='tests.integration.rewards:raises_at_times'}]",
        f"data.eval_path={json.dumps(str(held_out))}",
        "evaluation.group_size=4",
        "trainer.max_steps=5",
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all()
        _, scorer, _ = run.workers
        await run.until_over()
        steps = trainer.events_named("step")
        dropped = [step["dropped"] for step in steps]
        assert sum(counts.get("unscored", 0) for counts in dropped) > 0
        assert all(step["unscored"] == 0 for step in steps), "of what was trained, all had rewards"
        assert all(event["scored"] == "8/12" for event in trainer.events_named("evaluation"))
        failures = scorer.events_named("reward_failed")
        assert "KeyError: 'solution'" in failures[0]["problem"]
        assert 1 <= failures[0]["num_failures"] <= failures[0]["num_calls"]
        samples = [sample for sample in run.records("samples.jsonl") if sample["is_evaluation"]]
        completions = [item for sample in samples for item in sample["completions"]]
        assert len([item for item in completions if "KeyError" in str(item.get("problems"))]) == 2 * 4


async def test_a_reward_that_hangs_for_some_prompts_holds_up_no_others(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    reward = "scoring.rewards=[{function='tests.integration.rewards:hangs_at_times', timeout_s=0.5}]"
    settings = (reward, "scoring.num_processes=2", "trainer.max_steps=100000")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        _, scorer, trainer = run.workers

        async def two_rounds_of_hangs() -> bool:
            return (await run.ledger()).dropped.get("unscored", 0) >= 2 * run.config.scoring.num_processes

        await run.until(two_rounds_of_hangs, "as many hangs as would use up all processes twice")
        await run.until_trained((await run.ledger()).trained + 8)
        num_unscored = (await run.ledger()).dropped["unscored"]  # all of which were counted before
        served = await run.served(scorer)
        hung = served.total("rollstream_reward_calls_total", outcome="timeout")
        assert hung >= 4 * num_unscored > 0
        long_calls = served.total("rollstream_reward_seconds_count")
        long_calls -= served.total("rollstream_reward_seconds_bucket", le="0.25")
        assert long_calls >= hung / 4
        assert await run.metric(trainer, "rollstream_tokens_wasted_total", reason="unscored") > 0
        assert not any(sum(map(ord, sample["prompt"])) % 4 == 0 for sample in run.samples)
        await run.fleet.stop("the test is over")
        await run.until_over()


async def test_what_an_older_run_left_is_never_trained(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    async with running(
        tmp_path, valkey_url, run_name, *SCRIPTED, "queues.lease_s=1.0", "trainer.max_steps=100000"
    ) as run:
        await run.redis.set("somebody-else", b"stays")
        for worker in (run.start_all(), *run.workers[:2]):
            await run.until_steps(1)
            worker.kill()
        left = await run.ledger()
        assert left.live > 0
        elsewhere = f"run.dir={json.dumps(str(tmp_path / 'elsewhere'))}"
        stranger = run.start("trainer", elsewhere, may_fail=True)
        assert await run.until_exit(stranger) == [2]
        (line,) = [line for line in stranger.output.splitlines() if line.startswith("error: ")]
        assert f"run.name = '{run_name}': Redis holds groups of another run of this name" in line
        assert f"`rollstream reset --run {run_name}`" in line
        assert "(run.dir)" in line
        assert await run.ledger() == left

        async def none_is_alive() -> bool:
            return not any(info.is_alive for info in await run.fleet.workers())

        await run.until(none_is_alive, "the registry to take the killed workers for lost")
        assert (await run.command("reset", "--yes")).code == 0
        assert await run.redis.get("somebody-else") == b"stays"
        for role in ("generator", "scorer", "trainer"):
            run.start(role, elsewhere, "trainer.max_steps=2")
        await run.until_over()
        assert (await run.ledger()).trained == 8


async def test_a_run_whose_groups_all_die_ends_and_says_where_to_look(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = ("queues.max_payload_bytes=600", "algorithm.max_refill=2")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start("generator")
        run.start("scorer")
        trainer = run.start("trainer", may_fail=True)
        assert await run.until_exit(trainer) == [2]
        (line,) = [line for line in trainer.output.splitlines() if line.startswith("error: ")]
        assert "rollstream streams dead-letters" in line
        ledger = await run.ledger()
        assert ledger.trained == 0
        assert ledger.dead >= 2 * 4


async def test_status_names_a_run_that_does_not_move_because_its_groups_die(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    settings = ("queues.max_payload_bytes=600", "algorithm.max_refill=1000000")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start_all()
        seen: list[Limit] = []

        async def is_named() -> bool:
            seen.append((await collect(run.redis, Keys(run_name))).limit)
            return "died since the last step" in seen[-1].reason

        await run.until(is_named, "a limit that names the dead groups")
        assert (seen[-1].stage, seen[-1].is_blocked) == ("scorer", True), seen[-1]
        assert "the last died in rollouts: " in seen[-1].reason
        assert "`rollstream streams dead-letters` shows all" in seen[-1].reason
        await run.fleet.stop("the test is over")
        await run.until_over()


async def test_a_trainer_in_a_long_step_says_so(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    settings = ("trainer.scripted_step_s=3.0", "trainer.max_steps=1")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start_all()

        async def is_busy() -> bool:
            info = await run.info(trainer)
            return info is not None and info.status["busy_with"] == "an optimiser step"

        await run.until(is_busy, "a trainer that is busy")
        await run.until_over()
