"""`rollstream up` with real workers: it ends clean, however it ends (scenario E7)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import psutil
import pytest

from pipeline.cli import run
from pipeline.config import QueueSettings, RedisSettings
from pipeline.embedded import EmbeddedServer
from pipeline.keys import Keys
from pipeline.queues.ledger import Depth, Ledger
from pipeline.records.recorder import read_metrics
from pipeline.streams import Streams, connect
from tests.conftest import Answer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
SETTINGS = """
[generation]
engine = "scripted"
group_size = 2
max_tokens = 16
[generation.scripted]
length_mean = 8
[trainer]
max_steps = 1000000
groups_per_step = 4
scripted_step_s = 0.2
[[scoring.rewards]]
function = "length"
[scoring]
num_processes = 1
[worker]
heartbeat_s = 0.3
drain_timeout_s = 20.0
"""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    """Whether it is there; one that only waits to be buried is not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Up:
    """One `rollstream up` in a directory of its own."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory = directory
        (directory / "rollstream.toml").write_text(SETTINGS, encoding="utf-8")
        self.log = directory / f"up-{len(list(directory.glob('up-*.log')))}.log"
        environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.cli", "up", *words],
                cwd=directory,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environ, "PYTHONPATH": str(ROOT)},
            )
        self.run_dir = directory / "runs" / "default"

    def until_it_trains(self) -> None:
        until(lambda: len(read_metrics(self.run_dir)) >= 2 or self.process.poll() is not None, "two steps")
        assert self.process.poll() is None, self.log.read_text()

    def family(self) -> list[psutil.Process]:
        """Everything that it has started: workers, their children, the server."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(name: str, *words: str) -> Up:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        started.append(Up(directory, *words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def ask(up: Up, *words: str) -> Answer:
    """What another shell in the same directory hears; a process of its own would only import everything once more."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(up.directory), mock.patch.dict(os.environ), redirect_stdout(out), redirect_stderr(err):
        os.environ.pop("REDIS_URL", None)
        code = run(words)
    return Answer(code, out.getvalue(), err.getvalue())


def accounts(run_dir: Path) -> tuple[Ledger, list[Depth]]:
    """What is left in the run's own server, which keeps its data."""

    async def read(url: str) -> tuple[Ledger, list[Depth]]:
        async with connect(RedisSettings(), url) as redis:
            streams = Streams(redis, Keys("default"), QueueSettings(), consumer="test")
            return await streams.ledger(), list((await streams.depths()).values())

    with EmbeddedServer.start(run_dir / "redis", persist=True) as server:
        return asyncio.run(read(server.url))


def test_two_ups_do_not_fight_and_neither_a_signal_nor_a_kill_leaves_a_process(up: Callable[..., Up]) -> None:
    first, second = up("a", "--generators", "2"), up("b", "--no-exporter")
    first.until_it_trains()
    second.until_it_trains()
    family = first.family()
    assert len([process for process in family if "pipeline.cli" in " ".join(process.cmdline())]) == 5
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(DEADLINE_S) == 0, first.log.read_text()
    assert "drained before the run was over, at weight version " in first.log.read_text()
    assert "draining; Ctrl-C ends everything at once" in first.log.read_text()
    until(lambda: not any(map(runs, family)), "all processes to end")
    ledger, depths = accounts(first.run_dir)
    assert ledger.balances
    assert ledger.trained >= 8
    assert all(depth.pending == 0 for depth in depths), "a drained worker hands back what it holds"
    assert not (first.run_dir / "server.json").exists()

    assert second.process.poll() is None, "the other run goes on"
    third = up("b")
    assert third.process.wait(DEADLINE_S) == 2
    assert "another `up` of this run is at work" in third.log.read_text()
    family = second.family()
    assert len(family) >= 5
    second.process.kill()
    until(lambda: not any(map(runs, family)), "all processes to end")
    ledger, _ = accounts(second.run_dir)
    assert ledger.balances
    assert ledger.trained >= 8


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.path='nowhere.jsonl'", "nowhere.jsonl"),
        ("scoring.rewards=[{function='nowhere:nothing'}]", "nowhere"),
        ("generation.engine=transformers", "model.path"),
    ],
)
def test_a_mistake_that_can_be_seen_beforehand_starts_nothing(setting: str, said: str, up: Callable[..., Up]) -> None:
    one = up("a", "--set", setting)
    assert one.process.wait(DEADLINE_S) == 2
    lines = one.log.read_text().splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert said in lines[0]
    assert not one.run_dir.exists()


def test_an_up_whose_private_server_died_says_so_and_ends(up: Callable[..., Up]) -> None:
    one = up("a", "--no-exporter", "--set", "worker.drain_timeout_s=1.0")
    one.until_it_trains()
    family = one.family()
    (server,) = [process for process in family if "server" in process.name()]
    server.kill()
    assert one.process.wait(DEADLINE_S) == 3, one.log.read_text()
    assert "the private server of this run has ended; what it had written is kept" in one.log.read_text()
    until(lambda: not any(map(runs, family)), "all processes to end")


def test_an_up_whose_trainer_was_drained_ends_well_and_says_that_the_run_is_not_over(up: Callable[..., Up]) -> None:
    one = up("a", "--no-exporter")
    one.until_it_trains()
    assert ask(one, "drain", "trainer").code == 0
    assert one.process.wait(DEADLINE_S) == 0, one.log.read_text()
    assert "drained before the run was over, at weight version " in one.log.read_text()
    num_steps = len(read_metrics(one.run_dir))
    again = up("a", "--no-exporter", "--set", f"trainer.max_steps={num_steps + 2}")
    assert again.process.wait(DEADLINE_S) == 0, again.log.read_text()
    assert "before the run was over" not in again.log.read_text()
    assert len(read_metrics(one.run_dir)) == num_steps + 2


def test_a_trainer_that_always_crashes_ends_the_run_with_its_error_and_leaves_one_row_for_each_step(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    run_dir = tmp_path / "a" / "runs" / "default"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / ".writing-step_000001").write_text("a file, where a folder is to be cleared away")
    (tmp_path / "a" / "held-out.jsonl").write_text('{"prompt": "first"}\n')
    one = up("a", "--no-exporter", "--set", "trainer.max_steps=3", "--set", "data.eval_path='held-out.jsonl'")
    assert one.process.wait(DEADLINE_S) == 1, one.log.read_text()
    last = one.log.read_text().splitlines()[-1]
    assert last.startswith("error: trainer crashed 3 times: the checkpoint of step 3 cannot be written"), last
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "groups" in row] == [1, 2, 3]
    assert len([row for row in rows if "eval_reward" in row]) == 2, "before the first step and after the last"
    lost = [json.loads(line) for line in (run_dir / "metrics_lost.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lost if "groups" in row] == [1, 2, 3, 1, 2, 3]


def test_workers_come_and_go_as_another_shell_asks(up: Callable[..., Up]) -> None:
    one = up("a", "--no-exporter")
    one.until_it_trains()
    answer = ask(one, "scale", "generators=3", "scorers=2")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0].startswith("generators: 1 -> 3; ")
    until(lambda: "generator-3 |" in one.log.read_text() and "scorer-2  " in one.log.read_text(), "those who come")
    before = len(read_metrics(one.run_dir))
    assert ask(one, "scale", "scorers=1", "generators=1").code == 0
    gone = [f"{name} is done" for name in ("generator-2", "generator-3", "scorer-2")]
    until(lambda: all(words in one.log.read_text() for words in gone), "those who go")
    until(lambda: len(read_metrics(one.run_dir)) > before + 2, "two more steps")
    said = one.log.read_text()
    assert all(words in said for words in ("generators: 1 -> 3", "scorers: 1 -> 2", "generators: 3 -> 1"))
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(DEADLINE_S) == 0, one.log.read_text()
    ledger, _ = accounts(one.run_dir)
    assert ledger.balances
    assert (ledger.dead, ledger.num_dropped) == (0, 0)


def test_an_autoscaled_run_gets_generators_while_the_trainer_starves_and_gives_back_those_it_does_not_need(
    up: Callable[..., Up],
) -> None:
    # A generator makes one group after another, each in 0.2 s; the trainer takes four in a third of a second.
    settings = (
        "generation.max_num_seqs=2",
        "generation.scripted.tokens_per_s=40",
        "trainer.scripted_step_s=0.33",
        "staleness.max_staleness=4",
        "autoscale.max_generators=6",
        "autoscale.window_s=3",
        "autoscale.cool_down_s=1",
    )
    one = up("a", "--no-exporter", "--autoscale", *(word for setting in settings for word in ("--set", setting)))
    until(lambda: "autoscale: 1 -> 2 generators: the trainer waited " in one.log.read_text(), "a second generator")
    until(lambda: "generator-2 is " not in one.log.read_text() and "generator-2 |" in one.log.read_text(), "its start")
    assert ask(one, "scale", "generators=6").code == 0
    until(lambda: "autoscale: 6 -> 5 generators: the trainer did not wait " in one.log.read_text(), "one to leave")
    until(lambda: "generator-6 is done" in one.log.read_text(), "its end")
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(DEADLINE_S) == 0, one.log.read_text()


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file below a directory: when it was changed, and its size."""
    stats = {path: path.stat() for path in directory.rglob("*")}
    return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}


def test_an_up_sums_up_its_run_touches_nothing_once_that_is_over_and_goes_on_when_there_are_more_steps(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "held-out.jsonl").write_text('{"prompt": "first"}\n')
    words = ("--no-exporter", "--set", "data.eval_path='held-out.jsonl'", "--set", "weights.poll_s=30.0")
    one = up("a", *words, "--set", "trainer.max_steps=3")
    assert one.process.wait(DEADLINE_S) == 0, one.log.read_text()
    said = [line.partition("| ")[2] for line in one.log.read_text().splitlines() if line.startswith("rollstream")]
    assert not any("draining" in line for line in said)
    first, ledger, prompts, checkpoint, records = said[-5:]
    assert re.fullmatch(r"reward .* -> .*, held-out reward .* -> .*, 3 steps, \d+ s", first)
    assert ledger == "ledger: fed 12 = trained 12 + dropped 0 + dead 0 + live 0"
    assert prompts == "prompts: 12 of 1,024 seen (1%), solved: 100% always, 0% sometimes, 0% never"
    assert checkpoint == "checkpoint: runs/default/checkpoints/step_000003"
    assert records == "records: runs/default"

    before = contents(one.run_dir)
    again = up("a", *words, "--set", "trainer.max_steps=3")
    assert again.process.wait(DEADLINE_S) == 0
    assert again.log.read_text() == (
        "run 'default' is already over: all 3 steps are done; raise trainer.max_steps to go on, or choose another "
        "run.name\n"
    )
    assert contents(one.run_dir) == before

    # Its generator finds the new trainer's weights at once, not when it looks for them next.
    more = up("a", *words, "--set", "trainer.max_steps=5")
    assert more.process.wait(DEADLINE_S) == 0, more.log.read_text()
    assert " resumed step=3 " in more.log.read_text()
    assert "weight_publisher_silent" not in more.log.read_text()
    assert [row["step"] for row in read_metrics(one.run_dir) if "groups" in row] == [1, 2, 3, 4, 5]


def test_a_mistake_that_only_a_worker_can_see_ends_up_with_code_2_and_other_settings_need_the_reset_that_is_named(
    up: Callable[..., Up],
) -> None:
    useless = "{function='tests.rewards.samples:returns_what_is_asked',kwargs={what=['nothing']}}"
    one = up("a", "--no-exporter", "--set", f"scoring.rewards=[{useless}]")
    assert one.process.wait(DEADLINE_S) == 2, one.log.read_text()
    last = one.log.read_text().splitlines()[-1]
    assert last.startswith("error: ")
    assert "returned NoneType" in last
    assert not list(one.run_dir.glob("checkpoints/step_*")), "nothing was trained"
    mended = ("--no-exporter", "--set", "trainer.max_steps=2")
    refused = up("a", *mended)
    assert refused.process.wait(DEADLINE_S) == 2
    said = refused.log.read_text()
    assert "error: run.name = 'default' was started with other settings: scoring.rewards = length here" in said
    assert "`rollstream reset --run default --with-records`" in said
    assert ask(one, "reset", "--run", "default", "--yes").code == 0
    again = up("a", *mended)
    assert again.process.wait(DEADLINE_S) == 0, again.log.read_text()
    assert len(read_metrics(one.run_dir)) == 2

    before = contents(one.run_dir)
    changed = (*mended, "--set", "generation.group_size=3")
    refused = up("a", *changed)
    assert refused.process.wait(DEADLINE_S) == 2
    (line,) = refused.log.read_text().splitlines()
    assert line.startswith("error: runs/default/checkpoints/step_000002 was written with other settings")
    assert contents(one.run_dir) == before
    assert ask(one, "reset", "--run", "default", "--with-records", "--yes").code == 0
    again = up("a", *changed)
    assert again.process.wait(DEADLINE_S) == 0, again.log.read_text()
    assert (one.directory / "runs" / "default.old" / "checkpoints" / "step_000002").exists()
