"""Groups that pass rules, teachers and judges, each a stage of its own, as processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.keys import Stream
from tests.answering import answering, says
from tests.integration.harness import DEADLINE_S, SCRIPTED, running
from tests.integration.processes import Worker


def by_length(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
    """A score that depends on the question alone."""
    return says(json.dumps({"score": len(body["messages"][0]["content"]) % 11}))


def half(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
    """A teacher's server, which gives every token the logprob -0.5 and cannot be asked about its tokens."""
    if path != "/v1/completions":
        return 404, {"detail": "Not Found"}
    logprobs = [None, *({str(token): {"logprob": -0.5}} for token in body["prompt"][1:])]
    return 200, {"choices": [{"prompt_logprobs": logprobs}]}


def of_both(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
    """A server of teachers and judges."""
    return half(path, body, number) if path == "/v1/completions" else by_length(path, body, number)


async def test_a_group_passes_rules_teacher_and_judge_also_when_a_teacher_is_killed_and_a_judge_drained(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    gate, second_gate = threading.Event(), threading.Event()

    def behind_the_gate(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        if path == "/v1/completions":
            gate.wait(DEADLINE_S)
        return half(path, body, number)

    def behind_the_second(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        second_gate.wait(DEADLINE_S)
        return by_length(path, body, number)

    with answering(behind_the_gate) as teacher, answering(behind_the_second) as judge:
        more = (
            f"scoring.teachers=[{{name='big', model='tiny', url='{teacher.url}'}}]",
            f"scoring.judges=[{{name='fair', model='tiny', url='{judge.url}', weight=2.0}}]",
            "algorithm.distillation_coef=0.5",
            f"data.eval_path={json.dumps(str(held_out))}",
            "trainer.max_steps=4",
            "evaluation.at_end=false",
        )
        async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *more) as run:
            doomed, leaving = run.start("teacher"), run.start("judge")
            run.start_all()

            async def until_it_holds_some(worker: Worker) -> None:
                (info,) = await run.until_ready(worker)

                async def holds_some() -> bool:
                    return await run.num_held(info.worker_id) > 0

                await run.until(holds_some, f"a {worker.role} that holds groups")

            await until_it_holds_some(doomed)
            doomed.kill()
            assert list(json.loads((await run.command("status", "--json")).out)["streams"]) == list(Stream)
            run.start("teacher")
            gate.set()
            await until_it_holds_some(leaving)
            assert (await run.command("drain", "judge")).code == 0
            run.start("judge")
            second_gate.set()
            await run.until_over()
            assert leaving.events_named("left")[0]["groups_handed_back"] == 0, "it has finished what it held"
            ledger = await run.ledger()
            assert (ledger.trained, ledger.fed, ledger.dead, ledger.eval_done) == (16, 16, 0, 2)
            assert await run.num_in_streams() == 0
            assert dict(run.times_trained) == {f"{ordinal:08d}": 1 for ordinal in range(16)}
            for completion in (item for sample in run.samples for item in sample["completions"]):
                assert completion["outcomes"] == {"spread": "ok", "fair": "ok"}
                values = completion["rewards"]
                assert completion["reward"] == pytest.approx(values["spread"] + 2 * values["fair"])
                assert completion["teacher_logprob"] == -0.5
            held = [sample for sample in run.records("samples.jsonl") if sample["is_evaluation"]]
            assert held
            for completion in (item for sample in held for item in sample["completions"]):
                assert completion["outcomes"] == {"spread": "ok", "fair": "ok"}
                assert "teacher_logprob" not in completion, "what is held out needs no teacher"


async def test_rows_choose_their_teacher_and_need_no_reward_beside_it(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    data = tmp_path / "train.jsonl"
    rows = [{"prompt": "a", "by": "tiny"}, {"prompt": "b", "by": "small"}, {"prompt": "c", "by": "tiny"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with answering(half) as server:
        more = (
            f"scoring.teachers=[{{model='tiny', url='{server.url}'}}]",
            "scoring.rewards=[]",
            "scoring.teacher_column='by'",
            "algorithm.preset='opd'",
            f"data.path={json.dumps(str(data))}",
            "data.epochs=2",
            "trainer.groups_per_step=2",
            "trainer.max_steps=2",
            "staleness.max_staleness=0",
        )
        async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *more) as run:
            run.start("teacher")
            run.start_all()
            await run.until_over()
            assert "names the teacher 'small'; there are: tiny" in (await run.command("streams", "dead-letters")).out
            ledger = await run.ledger()
            assert (ledger.trained, ledger.dead) == (4, 2)
            completions = [item for sample in run.samples for item in sample["completions"]]
            assert {(item["reward"], item["teacher_logprob"]) for item in completions} == {(None, -0.5)}


async def test_a_worker_of_a_stage_that_the_run_lacks_says_which_setting_is_empty(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED) as run:
        workers = [run.start(role, may_fail=True) for role in ("teacher", "judge")]
        assert await run.until_exit(*workers) == [2, 2]
        for worker in workers:
            assert f"error: scoring.{worker.role}s is empty" in worker.output
