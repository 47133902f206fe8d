"""The command line: quick, thin, and never a traceback for a mistake of the user's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from redis.asyncio import Redis

from pipeline.checkpoints import Checkpoints
from pipeline.cli import cli
from pipeline.config import CheckpointSettings, QueueSettings, RedisSettings, StalenessSettings, TrainerSettings
from pipeline.embedded import EmbeddedServer
from pipeline.errors import RunConflictError
from pipeline.fleet import Fleet, WorkerInfo
from pipeline.keys import Keys, Stream
from pipeline.learner import ScriptedLearner
from pipeline.local.crew import Crew
from pipeline.local.first_contact import make_contact
from pipeline.local.run import LocalRun
from pipeline.local.server_address import announce_server, find_server, withdraw_server
from pipeline.queues.leases import Entry
from pipeline.settings.files import load_config
from pipeline.streams import Streams, connect

ROOT = Path(__file__).parent.parent
SETTINGS = ("pydantic", "torch", "transformers", "redis", "zmq", "numpy", "asyncio", "rich")


def commands(group: click.Group, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command as the words that call it."""
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        found.append((*words, name))
        if isinstance(command, click.Group):
            found += commands(command, (*words, name))
    return found


def imported_by(*words: str, code: int = 0) -> set[str]:
    """Top-level modules that a command line has imported when it ends with this code."""
    program = (
        "import sys\nfrom pipeline.cli import run\n"
        f"code = run({list(words)!r})\n"
        "print('MODULES', *{name.partition('.')[0] for name in sys.modules})\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return set(done.stdout.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize("words", [(), ("up",), ("status",), ("trainer",), ("streams", "peek")])
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    assert not imported_by(*words, "--help") & set(SETTINGS)


def test_showing_settings_needs_no_torch() -> None:
    assert not imported_by("config", "show") & {"torch", "transformers", "zmq"}


def test_a_worker_loads_nothing_that_draws(valkey_url: str, run_name: str) -> None:
    settings = (f"run.name='{run_name}'", f"redis.url='{valkey_url}'", "scoring.rewards=[]")
    found = imported_by("scorer", *(word for setting in settings for word in ("--set", setting)), code=2)
    assert "structlog" in found
    assert not found & {"rich", "pygments", "torch"}


@pytest.mark.parametrize("words", commands(cli), ids=" ".join)
def test_every_command_explains_itself(words: tuple[str, ...], ask) -> None:
    answer = ask(*words, "--help")
    assert answer.code == 0
    assert "Usage: rollstream " + " ".join(words) in answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no-such-command",), "no-such-command"),
        (("drain",), "ROLE|WORKER_ID"),
        (("config", "show", "--set", "trainer.max_stepps=3"), "did you mean trainer.max_steps?"),
        (("config", "show", "-c", "nowhere.toml"), "nowhere.toml: there is no such file"),
        (("generator", "-c", "nowhere.toml"), "nowhere.toml: there is no such file"),
        (("up", "--generators", "0"), "--generators"),
        (("streams", "requeue"), "--all"),
        (("streams", "peek", "nowhere"), "nowhere"),
        (
            ("streams", "peek"),
            "Missing argument '{prompts|rollouts|to_teach|to_judge|scored}'. Choose from: prompts, rollouts, to_teach, "
            "to_judge, scored",
        ),
        (("rollouts", "show", "00000001"), "no sample of group '00000001'"),
        (("config", "show", "--run", "a b"), "run.name = 'a b'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_ends_with_code_2_and_lines_that_say_error(words: tuple[str, ...], said: str, ask) -> None:
    answer = ask(*words)
    assert answer.code == 2
    assert answer.out == ""
    assert said in answer.err
    assert all(line.startswith("error: ") for line in answer.err.splitlines())


@pytest.mark.parametrize("words", [(), ("checkpoints",), ("rollouts",), ("config",), ("keys",)], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(words: tuple[str, ...], ask) -> None:
    answer = ask(*words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == ask(*words, "--help").out


@pytest.mark.parametrize("words", [("streams", "peek"), ("drain",), ("streams", "peek", "x"), ("up", "--scorers", "x")])
def test_a_mistake_on_the_command_line_is_one_line(words: tuple[str, ...], ask) -> None:
    (line,) = ask(*words).err.splitlines()
    assert "\t" not in line


def test_a_server_that_does_not_answer_ends_with_code_3_and_no_password(ask) -> None:
    answer = ask("streams", "--set", "redis.url=redis://user:hunter2@127.0.0.1:1")
    assert answer.code == 3
    assert answer.err.startswith("error: redis.url = redis://user:***@127.0.0.1:1")
    assert "hunter2" not in answer.err


def test_without_a_server_the_user_hears_how_to_get_one(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL")
    answer = ask("workers")
    assert answer.code == 2
    assert "rollstream up" in answer.err
    assert "REDIS_URL" in answer.err


def test_a_running_up_is_found_by_its_run_directory(
    ask, monkeypatch: pytest.MonkeyPatch, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    monkeypatch.delenv("REDIS_URL")
    run_dir = tmp_path / "runs" / run_name
    run_dir.mkdir(parents=True)
    announce_server(run_dir, valkey_url)
    assert oct((run_dir / "server.json").stat().st_mode)[-3:] == "600"
    assert ask("workers").code == 0
    withdraw_server(run_dir)
    assert ask("workers").code == 2


def test_an_up_that_was_killed_is_not_taken_for_running(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / "server.json").write_text(json.dumps({"url": "redis://x", "pid": child.pid}))
    assert find_server(tmp_path) is None


def test_the_file_in_the_working_directory_is_taken_when_none_is_named(ask, tmp_path: Path) -> None:
    (tmp_path / "rollstream.toml").write_text("trainer.max_steps = 77\n")
    assert "max_steps = 77" in ask("config", "show").out
    (tmp_path / "other.toml").write_text("")
    assert "max_steps = 77" not in ask("config", "show", "-c", "other.toml").out


def test_settings_given_to_a_group_reach_its_commands(ask) -> None:
    answer = ask("streams", "--set", "redis.url=redis://127.0.0.1:1", "peek", "prompts")
    assert answer.code == 3


def test_config_show_prints_toml_json_and_the_reference(ask) -> None:
    assert "[staleness]" in ask("config", "show").out
    assert json.loads(ask("config", "show", "--json").out)["staleness"]["max_staleness"] == 2
    assert ask("config", "show", "--reference").out == (ROOT / "config.toml").read_text(encoding="utf-8")


def test_config_schema_is_json(ask) -> None:
    assert json.loads(ask("config", "schema").out)["title"] == "Config"


async def put(redis: Redis, keys: Keys, count: int) -> Streams:
    streams = Streams(redis, keys, QueueSettings(), consumer="test")
    await streams.open()
    entries = [Entry(group_id=f"{i:08d}", weight_version=0, payload=b"x", ordinal=i) for i in range(count)]
    assert await streams.feed(entries, limit=100) == count
    return streams


def in_thread(ask, *words: str):
    """A command line brings its own event loop."""
    import asyncio

    return asyncio.to_thread(ask, *words)


async def test_streams_show_depths_and_ledger(ask, redis: Redis, keys: Keys) -> None:
    await put(redis, keys, 3)
    answer = await in_thread(ask, "streams")
    assert answer.code == 0
    assert "ledger balances: fed 3 = trained 0 + dropped 0 + dead 0 + live 3" in answer.out
    told = json.loads((await in_thread(ask, "streams", "--json")).out)
    assert told["streams"]["prompts"]["length"] == 3
    assert told["balances"] is True


async def test_peeking_takes_nothing(ask, redis: Redis, keys: Keys) -> None:
    streams = await put(redis, keys, 3)
    answer = await in_thread(ask, "streams", "peek", "prompts", "-n", "2", "--json")
    assert [entry["group_id"] for entry in json.loads(answer.out)] == ["00000000", "00000001"]
    assert (await streams.depths())[Stream.PROMPTS].backlog == 3


async def test_dead_letters_are_listed_and_brought_back(ask, redis: Redis, keys: Keys) -> None:
    streams = await put(redis, keys, 1)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=1.0)
    assert await streams.dead_letter(lease, "broken on purpose")
    assert "broken on purpose" in (await in_thread(ask, "streams", "dead-letters")).out
    assert (await in_thread(ask, "streams", "requeue", "--all")).out == "1 put back\n"
    assert (await in_thread(ask, "streams", "dead-letters")).out == "no dead letters\n"
    assert (await streams.ledger()).balances


async def test_pause_resume_and_drain_reach_the_fleet(ask, redis: Redis, keys: Keys) -> None:
    fleet = Fleet(redis, keys)
    worker = WorkerInfo(worker_id="generator-x", role="generator", host="here", pid=1)
    await fleet.register(worker)
    assert (await in_thread(ask, "pause")).code == 0
    assert (await fleet.beat(worker)).paused
    assert (await in_thread(ask, "resume")).code == 0
    assert (await in_thread(ask, "drain", "generator")).out == "draining generator-x\n"
    control = await fleet.beat(worker)
    assert (control.paused, control.drain) == (False, True)
    assert "generator-x" in (await in_thread(ask, "workers")).out


async def test_status_is_text_and_json(ask, redis: Redis, keys: Keys) -> None:
    await put(redis, keys, 3)
    assert (await in_thread(ask, "status")).code == 0
    assert json.loads((await in_thread(ask, "status", "--json")).out)


def test_records_of_a_run_are_read_back(ask, tmp_path: Path, run_name: str) -> None:
    sample = {
        "step": 4,
        "group_id": "00000007",
        "is_evaluation": False,
        "prompt": "abc",
        "completions": [{"text": "cba", "reward": 1.0, "versions": [[3, 0]]}],
    }
    folder = tmp_path / "runs" / run_name
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert "'cba'" in ask("rollouts", "tail").out
    assert json.loads(ask("rollouts", "show", "00000007", "--json").out) == sample
    assert ask("checkpoints", "list").out == "no complete checkpoint\n"


def test_checkpoints_are_listed_held_against_their_hashes_and_taken_out(ask, tmp_path: Path, run_name: str) -> None:
    learner = ScriptedLearner(TrainerSettings(), StalenessSettings())
    there = Checkpoints(tmp_path / "runs" / run_name / "checkpoints", CheckpointSettings())
    for step in (3, 6):
        there.save(step, learner=learner, state={"step": step})
    assert [item["step"] for item in json.loads(ask("checkpoints", "list", "--json").out)] == [3, 6]
    assert ask("checkpoints", "verify").out.count("files are as they were written") == 2
    assert ask("checkpoints", "export", "latest", "policy").out == "step 6: policy\n"
    assert (tmp_path / "policy" / "scripted.json").exists()
    again = ask("checkpoints", "export", "3", "policy")
    assert (again.code, "choose another" in again.err) == (2, True)
    assert ask("checkpoints", "export", "4", "elsewhere").code == 2
    for place in ("/dev/null/x", "policy/scripted.json/x", "x" * 300):
        refused = ask("checkpoints", "export", "latest", place)
        assert (refused.code, f"error: {place} cannot be written: " in refused.err) == (2, True)
    (there.find("3").model_dir / "scripted.json").write_text('{"num_steps": 1}\n')
    spoilt = ask("checkpoints", "verify", "all")
    assert (spoilt.code, "step 3: " in spoilt.err, "step 6: 3 files" in spoilt.out) == (1, True, True)
    newest = there.save(9, learner=learner, state={"step": 9})
    (newest / "state.json").unlink()
    damaged = ask("checkpoints", "verify", "all")
    assert (damaged.code, f"{newest.name} is no complete checkpoint" in damaged.err) == (1, True)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"group_id": "00000007"},
        {"group_id": "00000007", "is_evaluation": [], "completions": None, "prompt": None},
        {"group_id": "00000007", "completions": [{}, {"reward": 1.0}, {"text": "cba"}, "cba", None]},
        {"group_id": ["00000007"], "completions": {"text": "cba"}},
    ],
    ids=json.dumps,
)
def test_a_record_that_lacks_fields_is_shown_as_far_as_it_goes(
    ask, tmp_path: Path, run_name: str, record: dict[str, object]
) -> None:
    folder = tmp_path / "runs" / run_name
    folder.mkdir(parents=True)
    lines = ['{"group_id": "00000007", "compl', "[" * 100_000, '"not a record"', "\xff", json.dumps(record), ""]
    (folder / "samples.jsonl").write_text("\n".join(lines), encoding="latin-1")
    answer = ask("rollouts", "tail")
    assert answer.code == 0
    assert len([line for line in answer.out.splitlines() if line.startswith("step ")]) == 1
    assert json.loads(ask("rollouts", "tail", "--json").out) == record
    shown = ask("rollouts", "show", "00000007")
    assert shown.code == (0 if record.get("group_id") == "00000007" else 2)
    assert ("'cba'" in shown.out) == (len(record.get("completions") or []) == 5)  # type: ignore[arg-type]


def test_output_that_nobody_reads_to_its_end_ends_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "config", "show"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()


def test_a_worker_that_is_told_to_end_before_it_listens_exits_with_0(tmp_path: Path) -> None:
    # The signal comes while settings are read: a fifo holds the worker there.
    fifo = tmp_path / "settings.toml"
    os.mkfifo(fifo)
    worker = subprocess.Popen([sys.executable, "-m", "pipeline.cli", "scorer", "-c", str(fifo)])
    with fifo.open("w"):
        worker.send_signal(signal.SIGTERM)
    # Only now: a signal that comes just before the worker's read does not interrupt it.
    assert worker.wait(timeout=180) == 0


def test_a_worker_that_is_told_to_end_when_it_has_ended_keeps_its_exit_code(valkey_url: str, run_name: str) -> None:
    # The object goes when Python takes modules apart, after it has given signals their old meaning back.
    code = (
        "import os, signal, sys\nfrom pipeline.cli import run\n"
        "class Late:\n    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGTERM): kill(me, number)\n"
        "late = Late()\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    words = ["--run", run_name, "--set", f"redis.url={valkey_url}", "--set", "scoring.rewards=[{function='no:where'}]"]
    done = subprocess.run([sys.executable, "-c", code, "scorer", *words], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_worker_that_is_exiting_changes_nothing(number: int, valkey_url: str, run_name: str) -> None:
    code = """
import atexit, os, sys
atexit.register(lambda: os.kill(os.getpid(), int(sys.argv.pop())))
from pipeline.cli import main
main(sys.argv[1:-1])
"""
    words = ["scorer", "--run", run_name, "--set", f"redis.url='{valkey_url}'", "--set", "scoring.rewards=[]"]
    call = [sys.executable, "-c", code, *words, str(number)]
    worker = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, check=False)
    assert worker.returncode == 2
    assert worker.stderr.splitlines()[-1].startswith("error: scoring.rewards is empty")


def test_up_without_a_server_ends_before_it_starts_anything(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://user:sesame@127.0.0.1:1/0")
    settings = ("generation.engine='scripted'", "scoring.rewards=[{function='length'}]")
    answer = ask("up", *(word for item in settings for word in ("--set", item)))
    assert answer.code == 3
    (line,) = answer.err.splitlines()
    assert line.startswith("error: redis.url = redis://user:***@127.0.0.1:1/0: no server answers there (")
    assert "generator" not in answer.out


async def test_up_with_other_settings_than_the_run_has_says_so_once_and_readably(
    valkey_url: str, run_name: str, tmp_path: Path, redis: Redis, keys: Keys
) -> None:
    first, second = (
        load_config(
            [],
            environ={"REDIS_URL": valkey_url},
            overrides=[
                f"run.name='{run_name}'",
                f"run.dir='{tmp_path}'",
                f"scoring.rewards=[{{function='{function}', weight=0.5, kwargs={{whole=true}}}}]",
            ],
        )
        for function in ("format", "length")
    )
    await make_contact(first)
    await make_contact(first)
    with LocalRun(second, Crew()) as run, pytest.raises(RunConflictError) as caught:
        await run.run(run.supervisor(lambda *_: None), lambda _: None)
    assert "scoring.rewards = 0.5 x length(whole=true) here, 0.5 x format(whole=true) in the run" in str(caught.value)


async def test_first_contact_leaves_to_workers_what_a_server_that_answers_may_refuse(tmp_path: Path) -> None:
    with EmbeddedServer.start() as server:
        async with connect(RedisSettings(), server.url) as client:
            await client.config_set("requirepass", "sesame")
        config = load_config([], environ={"REDIS_URL": server.url}, overrides=[f"run.dir='{tmp_path}'"])
        await make_contact(config)
