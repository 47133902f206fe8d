"""A rank that another is gone from ends, and says so."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipeline.errors import RankLostError
from pipeline.programs import program
from pipeline.ranks.leader import tell
from pipeline.ranks.orders import Work
from pipeline.ranks.place import Place
from pipeline.ranks.world import World, collective
from tests.ranks.pairs import config_of, variables

LIMIT_S, POLL_S = 120, 0.02


@contextlib.contextmanager
def joined(tmp_path: Path) -> Iterator[tuple[World, subprocess.Popen[bytes]]]:
    """Rank 0 here, and rank 1 as the trainer starts it."""
    import torch.distributed as dist

    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = config_of(tmp_path, worker={"log_format": "json"})
    environ = {**os.environ, **variables(1, store.port), "LOCAL_RANK": "1"}
    with (tmp_path / "log").open("wb") as log:
        other = subprocess.Popen(program("workers.rank"), stdin=subprocess.PIPE, stderr=log, env=environ)
    assert other.stdin is not None
    with other.stdin as stdin:
        stdin.write(config.model_dump_json(exclude={"redis"}).encode())
    try:
        with mock.patch.dict(os.environ, variables(0, store.port)):
            world = World.join(Place(size=2), config.trainer)
        yield world, other
    finally:
        other.kill()
        other.wait()


def until_said(log: Path, event: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while event not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(POLL_S)


@pytest.mark.timeout(300)
def test_each_of_two_ranks_notices_that_the_other_is_gone(tmp_path: Path) -> None:
    """Rank 1 does not end at the first signal, which rank 0 has too; it does when rank 0 is gone."""
    with joined(tmp_path) as (world, other):
        until_said(tmp_path / "log", "rank_joined")
        other.terminate()
        tell(world, Work.STOP)
        world.leave()
        assert other.wait(LIMIT_S) == 0
    with joined(tmp_path) as (world, other):
        world.leave()
        gc.collect()  # a group's connections end with the last that holds it, as all do with a process
        assert other.wait(LIMIT_S) == 1
        said = (tmp_path / "log").read_text().splitlines()
        assert json.loads(said[-2])["event"] == "rank_failed"
        assert said[-1].startswith("error: another rank of this trainer has ended")
    with joined(tmp_path) as (world, other):
        other.kill()
        other.wait()
        with pytest.raises(RankLostError, match="another rank of this trainer has ended"), collective():
            tell_often(world)
        world.leave()


def tell_often(world: World) -> None:
    """What is sent first may still find room on its way."""
    for _ in range(100):
        tell(world, Work.LEAVE_DEVICE)
