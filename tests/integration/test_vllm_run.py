"""A run whose generator is vLLM: real processes, a real trainer, and a frozen policy to compare with.

Scenarios W1, W7, E3, S5, L5 and L6.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from pipeline.engines.vllm_options import installed_version
from tests.integration.harness import Run, running
from tests.integration.processes import Worker
from tests.integration.turns import assert_apart, turns_of
from tests.tiny import make_tiny_model

pytestmark = [
    pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed"),
    pytest.mark.timeout(400),
]

STARTS_S = 240.0


def settings(directory: Path, **trainer: object) -> list[str]:
    make_tiny_model(directory / "model", tie=True, hidden_size=128)
    rows = [json.dumps({"prompt": word}) for word in ("abc", "hello", "x", "reverse this", "a b", "zz9")]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return [
        f"model.path={json.dumps(str(directory / 'model'))}",
        f"data.path={json.dumps(str(directory / 'prompts.jsonl'))}",
        "generation.engine='vllm'",
        "generation.group_size=4",
        "generation.max_tokens=60",
        "generation.temperature=0.6",
        "generation.max_num_seqs=16",
        "generation.num_threads=1",
        "generation.device='cpu'",
        "scoring.rewards=[{function='tests.integration.rewards:vowels'}]",
        "scoring.num_processes=1",
        "trainer.groups_per_step=2",
        "trainer.num_threads=1",
        "checkpoint.every_steps=0",
        "queues.lease_s=5.0",
        "worker.heartbeat_s=0.3",
        "worker.log_format='json'",
        "tracking.samples_per_step=1000",
        *(f"trainer.{name}={value}" for name, value in trainer.items()),
    ]


def processes_below(worker: Worker) -> list[psutil.Process]:
    return psutil.Process(worker.pid).children(recursive=True)


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_weights_change_in_mid_sequence_and_the_trainer_finds_what_was_generated(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    """The policy is frozen: every version has the same weights, so any difference would be the pipeline's."""
    words = settings(tmp_path, max_steps=12, learning_rate=1e-30)
    async with running(tmp_path, valkey_url, run_name, *words) as run:
        run.start_all()
        await run.until_over(deadline_s=STARTS_S)
        ledger = await run.ledger()
        assert ledger.trained == 24
        assert ledger.balances
        for row in run.steps:
            assert row["importance_ratio_mean"] == pytest.approx(1.0, abs=1e-3)
            assert abs(row["mismatch_kl"]) < 1e-3
        assert sum(row["mixed_completions"] for row in run.steps) > 0
        for sample in run.samples:
            for item in sample["completions"]:
                versions = [version for version, _ in item["versions"]]
                assert versions == sorted(set(versions))
                assert item["versions"][0][1] == 0


async def test_vllm_and_the_trainer_take_turns_on_one_device(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    words = [*settings(tmp_path, max_steps=6, learning_rate=1e-30, device="'cpu'"), "run.topology='colocated'"]
    async with running(tmp_path, valkey_url, run_name, *words, "worker.log_level='debug'") as run:
        trainer, generator = run.start("trainer"), run.start("generator")
        run.start("scorer")
        await run.until_over(deadline_s=STARTS_S)
        ledger = await run.ledger()
        assert (ledger.trained, ledger.live) == (12, 0)
        assert_apart([*turns_of(trainer), *turns_of(generator)])
        for row in run.steps:
            assert row["importance_ratio_mean"] == pytest.approx(1.0, abs=1e-3)


async def test_a_generator_that_is_drained_or_killed_takes_all_of_vllm_along(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    words = settings(tmp_path, max_steps=100000, learning_rate=1e-3)
    async with running(tmp_path, valkey_url, run_name, *words) as run:
        drained, killed = run.start("generator"), run.start("generator", may_fail=True)
        run.start("scorer")
        run.start("trainer")
        await run.until_steps(2, deadline_s=STARTS_S)
        await _generate_on_both(run, drained, killed)

        below = processes_below(drained)
        assert below
        drained.signal(signal.SIGTERM)
        assert await run.until_exit(drained, deadline_s=60) == [0]
        assert not any(is_running(process) for process in below)

        below = processes_below(killed)
        assert below
        killed.kill()
        await run.until(lambda: not any(is_running(process) for process in below), "vLLM ended with its generator")
        assert (await run.ledger()).balances
        assert max(run.times_trained.values()) == 1


async def _generate_on_both(run: Run, *generators: Worker) -> None:
    async def have_tokens() -> bool:
        return all([await run.metric(item, "rollstream_tokens_out_total") > 0 for item in generators])

    await run.until(have_tokens, "tokens of both generators", deadline_s=STARTS_S)
