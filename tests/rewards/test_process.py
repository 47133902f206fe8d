"""Processes of reward functions: what they start ends with them, and signals do not end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.rewards.pools import reward, rewards_of, rollout, running_pool

SCORER = """
import asyncio
from tests.rewards.pools import reward, rollout, running_pool

async def main():
    async with running_pool(reward("{function}", timeout_s=60), num_processes=2) as pool:
        calls = [asyncio.create_task(pool.score(rollout("a"))) for _ in range({num_calls})]
        print("pids", *pool.pids, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def wait_until(condition: Callable[[], bool], seconds: float = 180.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_scorer(function: str, num_calls: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCORER.format(function=function, num_calls=num_calls)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def numbers_after(word: str, scorer: subprocess.Popen[str]) -> list[int]:
    assert scorer.stdout is not None
    for line in scorer.stdout:
        if line.startswith(word):
            return [int(number) for number in line.split()[1:]]
    pytest.fail(f"no line {word!r}")


@pytest.mark.parametrize(("function", "num_calls"), [("num_letters", 0), ("hangs", 2), ("hangs_in_c", 2)])
def test_a_scorer_that_is_killed_leaves_no_process(function: str, num_calls: int) -> None:
    with start_scorer(function, num_calls) as scorer:
        pids = numbers_after("pids", scorer)
        guards = [child.pid for child in psutil.Process(scorer.pid).children() if child.pid not in pids]
        scorer.send_signal(signal.SIGKILL)
    assert len(pids) == len(guards) == 2
    assert wait_until(lambda: all(is_gone(pid) for pid in pids + guards))


def test_programs_that_a_function_has_started_end_with_the_scorer() -> None:
    with start_scorer("hangs_with_a_program", 1) as scorer:
        numbers_after("pids", scorer)
        (program,) = numbers_after("program", scorer)
        scorer.send_signal(signal.SIGKILL)
    assert wait_until(lambda: is_gone(program))


async def test_programs_that_a_function_has_started_end_at_its_timeout(capfd: pytest.CaptureFixture[str]) -> None:
    async with running_pool(reward("hangs_with_a_program", timeout_s=2.0)) as pool:
        await pool.score(rollout("a"))
    program = int(capfd.readouterr().err.partition("program ")[2].split()[0])
    assert wait_until(lambda: is_gone(program))


async def test_programs_in_a_session_of_their_own_end_when_their_process_is_ended() -> None:
    async with running_pool(reward("starts_a_session")) as pool:
        (program,) = await rewards_of(pool, rollout("a"))
        assert program is not None
        assert not is_gone(int(program))
    assert wait_until(lambda: is_gone(int(program)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_of_a_drain_do_not_end_a_call(number: signal.Signals) -> None:
    async with running_pool(reward("process_id")) as pool:
        (pid,) = pool.pids
        os.killpg(os.getpgid(pid), number)
        assert await rewards_of(pool, rollout("a")) == [float(pid)]
        assert pool.pids == [pid]


async def test_a_reward_process_stays_small() -> None:
    async with running_pool(reward("num_letters")) as pool:
        await pool.score(rollout("a"))
        assert psutil.Process(pool.pids[0]).memory_info().rss < 40e6


async def test_where_the_queues_are_is_kept_from_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:password@host")
    monkeypatch.setenv("ROLLSTREAM_REDIS__URL", "redis://:password@host")
    monkeypatch.setenv("REWARD_KEY", "mine")
    async with running_pool(reward("sees_the_server")) as pool:
        assert await rewards_of(pool, rollout("a", "b")) == [0, 0]
