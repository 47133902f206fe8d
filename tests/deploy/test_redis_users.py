"""Users of deploy/redis: with them a real run ends well, and each may do its own work and nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from deploy.redis.users import ACL_FILE, USERS
from pipeline.checks.findings import Level
from pipeline.checks.server import examine_server
from pipeline.config import RedisSettings
from pipeline.embedded import find_server
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.scaling import Scaling
from pipeline.settings.files import load_config
from pipeline.streams import connect
from tests.answering import answering
from tests.conftest import Answer
from tests.deploy.servers import Users, make_users, on_socket, serving
from tests.integration.harness import SCRIPTED, running
from tests.integration.test_stages import of_both

ADMIN = "admin"
FOR_NOBODY = (
    "FLUSHALL",
    "CONFIG GET requirepass",
    "ACL LIST",
    "KEYS *",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "MODULE LIST",
    "SHUTDOWN NOSAVE",
    "SCRIPT FLUSH",
    "MONITOR",
    "REPLICAOF NO ONE",
    "PUBLISH channel text",
    "XTRIM {prompts} MAXLEN 0",
    "RENAME {prompts} {scored}",
    "GET {other}",
    "XLEN {other}",
)
NOT_FOR = {
    "trainer": ("UNLINK {prompts}", "SCAN 0"),
    "generator": ("HGETALL {meta}", "SET {trainer_lock} me", "SADD {evaluating} g", "UNLINK {prompts}"),
    "scorer": ("SET {trainer_lock} me", "GET {trainer_lock}", "DEL {prompts}", "XRANGE {other} - +"),
    "exporter": (
        "SET {trainer_lock} me",
        "XADD {prompts} * a b",
        "XREADGROUP GROUP rollstream me STREAMS {prompts} >",
        "XDEL {prompts} 1-1",
        "HINCRBY {ledger} fed 1",
    ),
    "autoscaler": ("XADD {prompts} * a b", "XRANGE {prompts} - +", "HGETALL {meta}", "EVAL {lua} 0"),
}


# The scripts that a role calls.
STAGE = ("open", "join", "beat", "reclaim", "renew", "hand_over", "release", "release_all", "dead_letter")
SCRIPTS_OF = {
    "trainer": (
        *(*STAGE, "feed", "refeed", "drop", "finish_training", "finish_evaluation", "last_letter"),
        *("lock", "unlock", "set_version", "stop", "turn", "common"),
    ),
    "generator": (*STAGE, "save_partials", "turn"),
    "scorer": STAGE,
    "teacher": STAGE,
    "judge": STAGE,
    "exporter": ("beat", "forget", "together", "depths", "ledger", "last_letter"),
    "operator": ("*",),
}
CALL, CONTAINER = r"call\('([A-Z]+)'", r"call\('(XGROUP|XINFO)', '([A-Z]+)'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A server that lets in the users of one run, and one who may look at its log."""

    keys: Keys
    users: Users
    socket: Path

    def url(self, user: str) -> str:
        return self.users.on_socket(user, self.socket)

    def client(self, user: str) -> Redis:
        return Redis.from_url(self.url(user), protocol=2)

    def admin(self) -> Redis:
        return Redis(unix_socket_path=str(self.socket), username=ADMIN, password="test", protocol=2)


@pytest.fixture(params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest, short_path: Path, run_name: str) -> Iterator[Guarded]:
    program = find_server() if request.param == "valkey" else shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    users = make_users(short_path / "users", run_name)
    with (users.folder / ACL_FILE).open("a") as acl:
        acl.write(f"user {ADMIN} on >test ~* &* +@all\n")
    path = short_path / "server.sock"
    with serving(program, short_path, users, *on_socket(path), url=f"unix://{ADMIN}:test@{path}"):
        yield Guarded(keys=Keys(run_name), users=users, socket=path)


async def test_a_run_in_which_every_role_is_a_user_of_its_own_ends_well(guarded: Guarded, tmp_path: Path) -> None:
    with answering(of_both) as server:
        await _run_as_users(guarded, tmp_path, server.url)
    # A worker that has waited long for a trainer would look for runs with similar names, and does without.
    assert [entry for entry in denied(guarded) if "'object': 'scan'" not in entry] == []


async def _run_as_users(guarded: Guarded, tmp_path: Path, models: str) -> None:
    """models: of a teacher and a judge."""
    stages = [f"scoring.{role}s=[{{model='tiny',url='{models}'}}]" for role in ("teacher", "judge")]
    more = ("checkpoint.every_steps=4", "staleness.requeue=true", "generation.group_size=2")
    more = (*more, "trainer.scripted_step_s=0.1")  # so that it is killed before its last step
    overrides = (*SCRIPTED, *stages, *more)
    async with running(tmp_path, guarded.url("operator"), guarded.keys.run, *overrides) as run:
        for role in ("exporter", "generator", "scorer", "teacher", "judge"):
            run.start(role, f"redis.url={guarded.url(role)}")
        gone = run.start("generator", f"redis.url={guarded.url('generator')}")
        first = run.start("trainer", f"redis.url={guarded.url('trainer')}")
        await run.until_steps(5)
        for worker in (
            gone,
            first,
        ):  # what they held lapses; the next trainer feeds again what was trained since step 4
            worker.kill()
        run.start("trainer", f"redis.url={guarded.url('trainer')}")
        await run.until_over()
        assert (await run.ledger()).trained == 10 * 4
        said = await run.command("status", "--json")
        assert said.code == 0, said.out


async def test_an_up_and_those_who_ask_it_for_workers_are_operators_and_the_exporter_sees_the_numbers(
    guarded: Guarded,
) -> None:
    async with (
        connect(RedisSettings(), guarded.url("operator"), retries=0) as operator,
        connect(RedisSettings(), guarded.url("exporter"), retries=0) as exporter,
    ):
        scaling = Scaling(operator, guarded.keys)
        await scaling.keep("up", {"generator": (1, 1), "scorer": (1, 1)}, ttl_s=30)
        assert await scaling.ask({"generator": 3}) == {"generator": 1}
        assert await Scaling(exporter, guarded.keys).kept() == {"generator": 1, "scorer": 1}
        await scaling.leave("up")
    assert denied(guarded) == []


@pytest.mark.parametrize("user", ["generator", "trainer"])
async def test_who_shares_a_device_takes_turns(guarded: Guarded, user: str) -> None:
    async with connect(RedisSettings(), guarded.url(user)) as client:
        fleet = Fleet(client, guarded.keys)
        for how in ("take", "keep", "give"):
            await fleet.device_turn(user, 5.0, how, "1")
    assert denied(guarded) == []


def test_people_look_and_reset_with_the_user_operator(guarded: Guarded, ask: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("REDIS_URL", guarded.url("operator"))
    for words in (["status"], ["workers"], ["streams"], ["streams", "dead-letters"], ["reset", "--yes"]):
        answer: Answer = ask(*words)
        assert answer.code == 0, answer.err
    assert denied(guarded) == []


def test_nobody_may_touch_the_server_or_other_runs(guarded: Guarded) -> None:
    for user in USERS:
        refuse(guarded, user, *FOR_NOBODY)


@pytest.mark.parametrize("user", NOT_FOR)
def test_a_role_may_not_do_the_work_of_another(guarded: Guarded, user: str) -> None:
    refuse(guarded, user, *NOT_FOR[user])


@pytest.mark.parametrize("user", ["generator", "scorer", "exporter"])
def test_a_script_may_do_no_more_than_its_caller(guarded: Guarded, user: str) -> None:
    with guarded.client(user) as client:
        for command in ("redis.call('FLUSHALL')", f"redis.call('GET', '{other_key(guarded)}')"):
            with pytest.raises(ResponseError, match=r"ACL failure|permission|can't (run|access)"):
                client.eval(command, 0)


@pytest.mark.parametrize("user", SCRIPTS_OF)
def test_a_user_may_use_every_command_in_the_scripts_that_it_calls(user: str) -> None:
    scripts = resources.files("pipeline") / "scripts"
    files = [path for name in SCRIPTS_OF[user] for path in Path(str(scripts)).rglob(f"{name}.lua")]
    assert len(files) >= len(SCRIPTS_OF[user])
    found = {match.lower() for path in files for match in re.findall(CALL, path.read_text())}
    found |= {
        f"{name.lower()}|{sub.lower()}" for path in files for name, sub in re.findall(CONTAINER, path.read_text())
    }
    assert found - {"xgroup", "xinfo"} <= set(USERS[user].commands.split())


@pytest.mark.parametrize("user", USERS)
def test_every_user_may_find_out_with_doctor_whether_the_server_answers(guarded: Guarded, user: str) -> None:
    findings = examine_server(load_config([], environ={"REDIS_URL": guarded.url(user)}))
    assert [finding.level for finding in findings if finding.level is not Level.HINT] == [Level.OK]


def test_the_user_for_probes_may_ping_and_nothing_else(guarded: Guarded) -> None:
    with Redis.from_url(f"unix://health:any@{guarded.socket}", protocol=2) as client:
        assert client.ping()
        with pytest.raises(NoPermissionError):
            client.info()


def test_an_autoscaler_sees_how_many_groups_wait(guarded: Guarded) -> None:
    """KEDA counts by PING, INFO, XINFO GROUPS (XLEN without a group) and XPENDING."""
    stream, empty, *_ = guarded.keys.streams
    with guarded.admin() as admin:
        admin.xgroup_create(stream, "rollstream", "0", mkstream=True)
        admin.xadd(stream, {"a": "b"})
    with guarded.client("autoscaler") as client:
        assert client.ping()
        assert int(str(client.info()["redis_version"]).split(".")[0]) >= 7
        assert client.xlen(empty) == 0
        (group,) = client.xinfo_groups(stream)
        assert group["lag"] == 1
        assert client.xpending(stream, "rollstream")["pending"] == 0


def test_without_a_password_nobody_gets_in(guarded: Guarded) -> None:
    with Redis(unix_socket_path=str(guarded.socket), protocol=2) as nobody, pytest.raises(AuthenticationError):
        nobody.ping()


def test_the_server_writes_down_what_is_queued_and_evicts_nothing(guarded: Guarded) -> None:
    with guarded.admin() as admin:
        assert admin.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert admin.config_get("appendonly") == {"appendonly": "yes"}


def test_files_with_passwords_are_for_their_owner_and_are_not_overwritten(tmp_path: Path) -> None:
    users = make_users(tmp_path / "users", "a")
    before = {path.name: path.read_text() for path in users.folder.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in users.folder.glob("*.env")} == {0o600}
    assert users.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(Exception, match="there already"):
        make_users(tmp_path / "users", "a")
    assert {path.name: path.read_text() for path in users.folder.iterdir()} == before
    passwords = {users.env(user).partition("@")[0] for user in USERS}
    assert len(passwords) == len(USERS)


def test_no_password_is_in_the_file_for_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users = make_users(tmp_path / "users", "a")
    said = capsys.readouterr().out + (users.folder / ACL_FILE).read_text()
    for user in USERS:
        assert users.env(user).partition("@")[0].rpartition(":")[2] not in said


def refuse(guarded: Guarded, user: str, *commands: str) -> None:
    with guarded.client(user) as client:
        for command in commands:
            with pytest.raises(NoPermissionError):
                client.execute_command(*words(command, guarded))


def words(command: str, guarded: Guarded) -> list[str]:
    keys = guarded.keys
    known = {"meta": keys.meta, "ledger": keys.ledger, "evaluating": keys.evaluating, "trainer_lock": keys.trainer_lock}
    names = {**known, **dict(zip([stream.value for stream in Stream], keys.streams, strict=True))}
    names |= {"other": other_key(guarded), "lua": "return 1"}
    return [word if word[:1] != "{" else names[word[1:-1]] for word in command.split(" ")]


def other_key(guarded: Guarded) -> str:
    """A key of a run whose name begins like this one's."""
    return Keys(f"{guarded.keys.run}2").streams[0]


def denied(guarded: Guarded) -> list[str]:
    """What users were refused."""
    with guarded.admin() as admin:
        log = admin.execute_command("ACL LOG")
    return [str(entry) for entry in log]
