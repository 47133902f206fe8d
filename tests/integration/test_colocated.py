"""Generation and training that take turns on one device, where sequences are in flight and a worker dies.

That such a run trains the same as one with a device for each is in test_synchronous.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.keys import Keys
from tests.integration.harness import running
from tests.integration.test_records import assert_described
from tests.integration.turns import assert_apart, turns_of
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(600)

DEADLINE_S = 240.0  # four processes load torch first, which is slow on a busy machine


def settings(directory: Path) -> list[str]:
    make_tiny_model(directory / "model")
    rows = [json.dumps({"prompt": word}) for word in ("abc", "hello", "x", "reverse this", "a b", "zz9")]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    data = json.dumps(str(directory / "prompts.jsonl"))
    return [
        "run.topology='colocated'",
        f"model.path={json.dumps(str(directory / 'model'))}",
        f"data.path={data}",
        f"data.eval_path={data}",
        "generation.group_size=4",
        "generation.max_tokens=100",
        "generation.temperature=0.6",
        "generation.max_num_seqs=12",
        "generation.num_threads=1",
        "scoring.rewards=[{function='tests.integration.rewards:vowels'}]",
        "scoring.num_processes=1",
        "staleness.max_staleness=3",
        "trainer.groups_per_step=3",
        "trainer.max_steps=8",
        "trainer.learning_rate=0.001",
        "trainer.num_threads=1",
        "checkpoint.every_steps=0",
        "queues.lease_s=10.0",  # a busy machine keeps a worker that computes silent for seconds
        "worker.heartbeat_s=0.3",
        "worker.log_format='json'",
        "worker.log_level='debug'",
        "tracking.samples_per_step=1000",
    ]


async def test_generators_take_turns_too_and_one_that_dies_with_the_device_loses_it(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *settings(tmp_path)) as run:
        trainer, *generators = run.start("trainer"), run.start("generator"), run.start("generator")
        run.start("scorer")
        await run.until_steps(2, deadline_s=DEADLINE_S)
        holder = str(await run.redis.get(Keys(run_name).device_turn))
        infos = [await run.info(worker) for worker in generators]
        killed = next((i for i, info in enumerate(infos) if info and info.worker_id in holder), 0)
        generators[killed].kill()
        assert await run.until_exit(trainer, deadline_s=DEADLINE_S) == [0]
        ledger = await run.ledger()
        assert ledger.trained == 24
        assert max(run.times_trained.values()) == 1
        assert_apart([*turns_of(trainer), *turns_of(generators[1 - killed])])
        assert any(len(item["versions"]) == 2 for sample in run.samples for item in sample["completions"]), (
            "no sequence was in flight when the trainer took the device"
        )
        assert_described(run.metrics)
