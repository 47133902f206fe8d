"""A publisher in a process of its own: the same channel, whatever happens to either process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError, WeightError
from pipeline.weights import WeightPublisher, WeightState, WeightSubscriber
from pipeline.weights.channel import create_publisher
from pipeline.weights.process import PublisherProcess
from tests.weights.drift import drifted
from tests.weights.states import FAST, at, make_state, next_within, same, tensor, until

DELTA = FAST.model_copy(update={"encoding": "delta", "tile_bytes": 16_384})
ROOT = Path(__file__).parents[2]


def child_of(process: psutil.Process) -> psutil.Process:
    """The process that serves weights for another."""
    (child,) = [found for found in process.children() if "pipeline.weights.serving" in words_of(found)]
    return child


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty where it has ended."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


async def test_what_is_published_arrives_bit_for_bit_whole_and_as_changes() -> None:
    with PublisherProcess(DELTA) as publisher:
        async with WeightSubscriber(DELTA, resolve=at(publisher.start())) as subscriber:
            last = None
            for version in range(6):
                publisher.publish(drifted(version))
                state = await next_within(subscriber, last)
                assert same(state, drifted(version))
                last = version
            assert subscriber.stats.num_patched == 5
            # What the process says of itself comes a moment later.
            await until(lambda: publisher.stats.num_versions == 6)
            await until(lambda: publisher.stats.server.num_bytes > subscriber.stats.num_received_bytes)


async def test_the_trainer_may_change_its_tensors_at_once() -> None:
    live = np.arange(50_000, dtype=np.float32)
    before = live.tobytes()
    state = replace(make_state(0), tensors={"a": replace(tensor(live, "float32"), data=live.data.cast("B"))})
    with PublisherProcess(FAST) as publisher:
        async with WeightSubscriber(FAST, resolve=at(publisher.start())) as subscriber:
            publisher.publish(state)
            live += 1
            assert bytes((await next_within(subscriber, None)).tensors["a"].data) == before


async def test_a_newer_version_overtakes_those_that_wait_and_memory_is_used_again() -> None:
    with PublisherProcess(FAST) as publisher:
        async with WeightSubscriber(FAST, resolve=at(publisher.start())) as subscriber:
            child = child_of(psutil.Process())
            child.suspend()
            for version in range(4):  # as many as there are slots
                publisher.publish(make_state(version, num_bytes=1_000_000))
            child.resume()
            for version in range(4, 60):
                publisher.publish(make_state(version, num_bytes=1_000_000))
            state = await next_within(subscriber, 58)
            assert same(state, make_state(59, num_bytes=1_000_000))
            shared = [item for item in psutil.Process().memory_maps() if "rollstream-weights" in item.path]
            assert 1 <= len(shared) <= 4
            await until(lambda: 1 <= publisher.stats.num_versions <= 57)


async def test_versions_may_grow_and_shrink_and_be_empty() -> None:
    empty = WeightState(
        weight_version=3, kind=make_state(0).kind, tensors={"a": tensor(np.empty(0, np.float32), "float32")}
    )
    states = [make_state(0), make_state(1, num_bytes=3_000_000), make_state(2, num_bytes=500), empty, make_state(4)]
    with PublisherProcess(FAST) as publisher:
        async with WeightSubscriber(FAST, resolve=at(publisher.start())) as subscriber:
            for state in states:
                publisher.publish(state)
                assert same(await next_within(subscriber, state.weight_version - 1), state)


async def test_what_is_wrong_with_a_version_is_said_to_who_publishes_it() -> None:
    with PublisherProcess(FAST) as publisher:
        publisher.start()
        publisher.publish(make_state(3))
        with pytest.raises(WeightError, match="not newer"):
            publisher.publish(make_state(3))
        odd = replace(make_state(4), tensors={"a": replace(tensor(np.zeros(3), "float32"), shape=(7,))})
        for wrong, reason in ((odd, "'a'"), (replace(odd, weight_version=np.int64(4)), r"int\(version\)")):
            for _ in range(5):  # more than there are slots, each of which is to be had again
                with pytest.raises(WeightError, match=reason):
                    publisher.publish(wrong)
        publisher.publish(make_state(5))


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = FAST.model_copy(update={"port": taken.getsockname()[1]})
        publisher = PublisherProcess(settings)
        with pytest.raises(ConfigError, match=r"weights\.port"):
            publisher.start()
        publisher.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_the_whole_group_leaves_the_last_weights_to_be_had(number: signal.Signals) -> None:
    with PublisherProcess(FAST) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1))
        child_of(psutil.Process()).send_signal(number)
        async with WeightSubscriber(FAST, resolve=at(endpoints)) as subscriber:
            assert same(await next_within(subscriber, None), make_state(1))


async def test_the_death_of_the_process_is_seen_and_the_next_version_refused() -> None:
    with PublisherProcess(FAST) as publisher:
        publisher.start()
        publisher.publish(make_state(1))
        assert publisher.is_serving
        child_of(psutil.Process()).kill()
        await until(lambda: not publisher.is_serving)
        with pytest.raises(WeightError, match="has ended"):
            publisher.publish(make_state(2))


def test_the_process_ends_with_the_trainer_however_that_ends() -> None:
    code = """
import sys
from pipeline.config import WeightSettings
from pipeline.weights.process import PublisherProcess
from tests.weights.states import make_state
publisher = PublisherProcess(WeightSettings())
publisher.start()
publisher.publish(make_state(1))
print("published", flush=True)
sys.stdin.read()
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "published\n"
        child = child_of(psutil.Process(trainer.pid))
        trainer.kill()
    assert gone(child)


def test_modules_of_ones_own_may_have_the_names_of_ours(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text("raise SystemExit('another project')")
    code = """
from pipeline.config import WeightSettings
from pipeline.programs import program
from pipeline.weights.process import PublisherProcess
with PublisherProcess(WeightSettings()) as publisher:
    assert publisher.start().tiles
import subprocess
subprocess.run([*program("pipeline.cli"), "config", "show"], check=True, stdout=subprocess.DEVNULL)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=280, cwd=tmp_path, env=environ)


def gone(process: psutil.Process) -> bool:
    """Whether it ends, within the deadline."""
    try:
        process.wait(120)
    except psutil.NoSuchProcess:
        return True
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_nothing_is_left_after_closing_twice() -> None:
    publisher = PublisherProcess(FAST)
    publisher.start()
    publisher.publish(make_state(1))
    child = child_of(psutil.Process())
    publisher.close()
    publisher.close()
    assert gone(child)
    with pytest.raises(WeightError, match="has ended"):
        publisher.publish(make_state(2))


@pytest.mark.parametrize(
    ("choice", "num_bytes", "kind"),
    [
        ("auto", 1_000, WeightPublisher),
        ("auto", 64_000_000, PublisherProcess),
        ("never", 64_000_000, WeightPublisher),
        ("always", 1_000, PublisherProcess),
    ],
)
def test_small_versions_need_no_process(choice: str, num_bytes: int, kind: Callable[..., object]) -> None:
    publisher = create_publisher(
        WeightSettings.model_validate({"own_process": choice}), num_bytes=num_bytes, run="run.1"
    )
    assert type(publisher) is kind
    publisher.close()


@pytest.mark.parametrize("store", ["", "memory://weights"])
def test_a_version_that_nobody_would_take_is_refused_before_anything_starts(store: str) -> None:
    settings = WeightSettings(max_model_bytes=1000, store=store)
    with pytest.raises(ConfigError, match=r"weights\.max_model_bytes = 1000: a version of this model has 1001 bytes"):
        create_publisher(settings, num_bytes=1001, run="run.1")


def test_the_process_needs_no_torch() -> None:
    code = "import sys, pipeline.weights.serving; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280, cwd=ROOT)


async def test_publishing_goes_on_while_a_receiver_reads_an_older_version() -> None:
    slow = FAST.model_copy(update={"credits": 1})
    with PublisherProcess(FAST) as publisher:
        async with WeightSubscriber(slow, resolve=at(publisher.start())) as subscriber:
            publisher.publish(make_state(0, num_bytes=2_000_000))
            waiting = asyncio.create_task(next_within(subscriber, None))
            for version in range(1, 30):
                publisher.publish(make_state(version, num_bytes=2_000_000))
                await asyncio.sleep(0)
            first = await waiting
            assert same(first, make_state(first.weight_version, num_bytes=2_000_000))
            if first.weight_version < 29:
                last = await next_within(subscriber, 28)
                assert same(last, make_state(29, num_bytes=2_000_000))


async def test_a_process_that_cannot_take_a_version_in_ends_and_is_missed() -> None:
    with PublisherProcess(FAST) as publisher:
        publisher.start()
        child = child_of(psutil.Process())
        child.rlimit(psutil.RLIMIT_NOFILE, (3, 3))
        with contextlib.suppress(WeightError):  # it may be seen at once
            publisher.publish(make_state(1))
        await until(lambda: not publisher.is_serving)
        assert gone(child)


async def test_closing_does_not_wait_for_a_version_that_a_frozen_process_never_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.weights.process._END_S", 0.2)
    publisher = PublisherProcess(FAST)
    publisher.start()
    child = child_of(psutil.Process())
    child.suspend()
    for version in range(4):
        publisher.publish(make_state(version))
    waiting = asyncio.create_task(asyncio.to_thread(publisher.publish, make_state(4)))
    async with asyncio.timeout(25):  # less than a process may be silent
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.1)
        await asyncio.to_thread(publisher.close)
        with pytest.raises(WeightError, match="has ended"):
            await waiting
    assert gone(child)


async def test_a_frozen_process_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.weights.process._WAIT_S", 0.1)
    monkeypatch.setattr("pipeline.weights.process._SILENT_S", 0.3)
    monkeypatch.setattr("pipeline.weights.process._END_S", 0.2)
    with PublisherProcess(FAST) as publisher:
        publisher.start()
        child_of(psutil.Process()).suspend()
        for version in range(4):
            publisher.publish(make_state(version))
        with pytest.raises(WeightError, match="no sign of life"):
            publisher.publish(make_state(4))
        assert not publisher.is_serving


async def test_a_frozen_process_is_missed_though_nothing_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.weights.process._WAIT_S", 0.1)
    monkeypatch.setattr("pipeline.weights.process._SILENT_S", 2.5)
    monkeypatch.setattr("pipeline.weights.process._END_S", 0.2)
    with PublisherProcess(FAST) as publisher:
        publisher.start()
        assert publisher.is_serving
        child_of(psutil.Process()).suspend()
        await until(lambda: not publisher.is_serving)
