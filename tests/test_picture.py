"""`rollstream status --watch`: a picture that fits, and what a program gets instead."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from redis.asyncio import Redis

from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.picture import NARROWEST, History, picture, sparkline
from pipeline.run.limits import Limit
from pipeline.run.status import RunStatus, collect
from pipeline.run.status_schema import MEANINGS, status_schema
from tests.conftest import Answer
from tests.run_states import worker
from tests.test_status import a_run

Ask = Callable[..., Answer]
ROOT = Path(__file__).parent.parent


async def seen(redis: Redis, keys: Keys, *, num_looks: int = 3) -> tuple[RunStatus, History]:
    """A run that was looked at a few times, ten groups being fed between two looks."""
    await a_run(redis, keys)
    status, history = await collect(redis, keys), History()
    for look in range(num_looks):
        ledger = dataclasses.replace(status.ledger, fed=status.ledger.fed + 10)
        status = dataclasses.replace(status, at=status.at + 5, step=12 + look, reward_mean=0.1 * look, ledger=ledger)
        history.add(status)
    return status, history


def drawn(status: RunStatus, history: History, width: int, **more: str) -> list[str]:
    return [line.plain for line in picture(status, history, screen_width=width, **more)]


@pytest.mark.parametrize("width", [NARROWEST, 140, 220])
async def test_a_picture_fits_and_names_queues_rates_and_workers(redis: Redis, keys: Keys, width: int) -> None:
    status, history = await seen(redis, keys)
    lines = drawn(status, history, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "▶ step 14" in text
    assert any(line.endswith("▶ step 1234") for line in drawn(dataclasses.replace(status, step=1234), history, width))
    far = drawn(dataclasses.replace(status, step=123456789), history, width)
    assert any(line.endswith("123456789") for line in far), "a number is never cut"
    for words in ("┌prompts", "┌rollouts", "┌scored", "2 waiting", "1 in work", "feeder", "limited by generator", "▲"):
        assert words in text
    assert ("2/s" if width == NARROWEST else "2 groups/s") in text, "ten groups in five seconds"
    assert all(any(line.startswith(f"{role}-a ") for line in lines) for role in ("generator", "scorer", "trainer"))
    assert "fed 33 = trained 0" in text


@pytest.mark.parametrize("width", [NARROWEST, 140])
async def test_a_picture_of_a_run_with_teachers_and_judges_has_their_queues_in_a_second_row(
    redis: Redis, keys: Keys, width: int
) -> None:
    models = {f"scoring.{role}s": '[["big", "m", 1.0]]' for role in ("teacher", "judge")}
    await Fleet(redis, keys).join(models)
    status, history = await seen(redis, keys)
    lines = drawn(status, history, width)
    assert max(map(len, lines)) <= width
    (first,) = [line for line in lines if "┌prompts" in line]
    (second,) = [line for line in lines if "┌to_judge" in line]
    assert "┌rollouts" in first
    assert "┌to_teach" in first
    assert "┌scored" in second
    text = "\n".join(lines)
    assert "no judge is alive" in " ".join(text.split())
    assert "── weights: version 12" in text


async def test_on_a_narrower_screen_lines_are_cut(redis: Redis, keys: Keys) -> None:
    lines = drawn(*await seen(redis, keys), 50)
    assert max(map(len, lines)) == 50
    assert any(line.endswith("…") for line in lines)


async def test_a_wide_picture_says_more(redis: Redis, keys: Keys) -> None:
    status, history = await seen(redis, keys)
    text = "\n".join(drawn(status, history, 140))
    for words in ("800 tok/s", "640 tok/s", "weights: version 12, served 11", "▶ step 14", "rewards ▁▅█"):
        assert words in text


async def test_a_run_that_is_blocked_over_or_unreachable_is_drawn_too(redis: Redis, keys: Keys) -> None:
    status, history = await seen(redis, keys)
    blocked = dataclasses.replace(status, limit=Limit(stage="scorer", reason="no scorer is alive", is_blocked=True))
    assert "BLOCKED by scorer: no scorer is alive" in drawn(blocked, history, 80)
    empty = dataclasses.replace(status, streams={}, workers=(), step=None)
    assert not any("prompts" in line for line in drawn(empty, history, 80)[:2])
    assert "the server does not answer" in drawn(status, history, 80, note="the server does not answer")
    lost = worker("generator", is_alive=False)
    assert "LOST" in "".join(drawn(dataclasses.replace(status, workers=(lost,)), history, 80))


def test_bars_stand_between_zero_and_the_greatest() -> None:
    assert sparkline([0, 1, 2], 9) == "▁▅█"
    assert sparkline([5, 5, 5, 0], 2) == "█▁"
    assert sparkline([-1, 0], 9) == "▁█"
    assert sparkline([0, 0], 9) == "▁▁"
    assert sparkline([], 9) == ""


async def test_what_status_prints_as_json_is_what_its_schema_says(ask: Ask, redis: Redis, keys: Keys) -> None:
    schema = json.loads((await asyncio.to_thread(ask, "status", "--schema")).out)
    assert schema == status_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(json.loads((await asyncio.to_thread(ask, "status", "--json")).out))
    await a_run(redis, keys)
    printed = json.loads((await asyncio.to_thread(ask, "status", "--json")).out)
    validator.validate(printed)
    assert printed["streams"]["prompts"]["backlog"] == 2
    for spoil in ({"step": "twelve"}, {"another": 1}, {"ledger": {}}, {"streams": {"elsewhere": {}}}):
        assert not validator.is_valid({**printed, **spoil})


def test_every_field_has_a_meaning() -> None:
    for carrier, meanings in MEANINGS.items():
        assert list(meanings) == [field.name for field in fields(carrier)], carrier


def watching(run_name: str, url: str, directory: Path, output: int) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        "REDIS_URL": url,
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
        "COLUMNS": "100",
        "LINES": "40",
    }
    words = [sys.executable, "-m", "pipeline.cli", "status", "--watch", "--run", run_name]
    return subprocess.Popen(words, cwd=directory, env=environ, stdin=output, stdout=output, stderr=subprocess.STDOUT)


def read_until(descriptor: int, words: str, *, times: int = 1) -> str:
    text, deadline = "", time.monotonic() + 180
    while text.count(words) < times:
        assert time.monotonic() < deadline, text
        if select.select([descriptor], [], [], 1.0)[0]:
            text += os.read(descriptor, 65536).decode(errors="replace")
    return text


async def test_a_terminal_gets_a_picture_until_ctrl_c(
    redis: Redis, keys: Keys, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    await a_run(redis, keys)
    ours, theirs = pty.openpty()
    process = watching(run_name, valkey_url, tmp_path, theirs)
    os.close(theirs)
    try:
        text = await asyncio.to_thread(read_until, ours, "┌prompts", times=2)
        assert "\x1b[?1049h" in text, "it has the screen for itself"
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(read_until, ours, "stream    groups")
        assert await asyncio.to_thread(process.wait, 180) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


async def test_a_pipe_gets_plain_text_until_ctrl_c(
    redis: Redis, keys: Keys, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    await a_run(redis, keys)
    read_end, write_end = os.pipe()
    process = watching(run_name, valkey_url, tmp_path, write_end)
    os.close(write_end)
    try:
        text = await asyncio.to_thread(read_until, read_end, "stream    groups", times=2)
        assert "\x1b" not in text
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 180) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read_end)
