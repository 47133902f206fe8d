"""The launcher for Hugging Face Jobs: the real client against a server that takes down what it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pipeline.settings.files import load_config
from tests.deploy.files import ROOT, check_command
from tests.deploy.servers import Users, make_users

IMAGE = "registry.example.com/rollstream-{role}:0.1.0"
SECRET = "of-the-store"
ROLES = ("trainer", "generator", "scorer", "teacher", "judge")


@dataclass
class Hub:
    """What Hugging Face was asked. refuses: answers 403."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    refuses: bool = False


@pytest.fixture
def hub() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/api/jobs/me"
            made.tokens.add(self.headers["Authorization"])
            made.asked.append(body)
            job = {"id": f"job{len(made.asked)}", "owner": {"id": "1", "name": "me", "type": "user"}}
            answer = {"error": f"no: {body}"} if made.refuses else {**job, "status": {"stage": "RUNNING"}}
            text = json.dumps(answer).encode()
            self.send_response(403 if made.refuses else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Hub(url=f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def users(tmp_path: Path) -> Users:
    return make_users(tmp_path / "secrets", "my-run", "--server", "queue-host:6379", "--tls")


def launch(users: Users, *words: str, hub: Hub | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_TOKEN": "hf_test", "STORE_KEY": SECRET}
    if hub is not None:
        environ["HF_ENDPOINT"] = hub.url
    places = ["--input", "dataset:me/my-run", "--records", "bucket:me/my-run", "--store", "s3://bucket/my-run"]
    settings = ["--secrets", str(users.folder), "--namespace", "me", "--secret", "STORE_KEY"]
    command = [sys.executable, "-m", "deploy.hf_jobs.launch", "--run", "my-run", "--image", IMAGE, *places, *settings]
    return subprocess.run([*command, *words], capture_output=True, text=True, check=False, env=environ)


def without_secrets(text: str, users: Users) -> bool:
    passwords = {users.env(role).rpartition("@")[0].rpartition(":")[2] for role in ROLES}
    return not any(secret in text for secret in {*passwords, SECRET, "hf_test"})


def test_a_dry_run_shows_every_job_and_no_secret(users: Users) -> None:
    done = launch(users, "--generators", "2", "--teachers", "1", "--judges", "1", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert without_secrets(done.stdout + done.stderr, users)
    jobs = json.loads(done.stdout)
    assert [job["name"] for job in jobs] == [
        "my-run-trainer-0",
        "my-run-generator-0",
        "my-run-generator-1",
        "my-run-scorer-0",
        "my-run-teacher-0",
        "my-run-judge-0",
    ]
    assert {tuple(job["secrets"]) for job in jobs} == {("REDIS_URL", "STORE_KEY")}
    for job in jobs:
        role = job["labels"]["rollstream-role"]
        assert job["image"] == f"registry.example.com/rollstream-{role}:0.1.0"
        program, *words = job["command"]
        assert (program, words[0]) == ("rollstream", role)
        check_command(words)
        config = load_config([], environ=job["env"])
        assert (config.weights.store, str(config.run.dir)) == ("s3://bucket/my-run", "/runs")
        mounted = {volume["mountPath"]: volume.get("readOnly") for volume in job["volumes"]}
        assert mounted == ({"/input": True, "/runs": False} if role == "trainer" else {"/input": True})


def test_jobs_are_asked_for_with_the_address_of_their_own_user(users: Users, hub: Hub) -> None:
    done = launch(users, "--set", "trainer.max_steps=7", "--timeout", "2h", "--trainer-flavor", "h200", hub=hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"my-run-{role}-0: {hub.url}/jobs/me/job{number}"
        for number, role in enumerate(("trainer", "generator", "scorer"), start=1)
    ]
    for job in hub.asked:
        role = job["labels"]["rollstream-role"]
        assert job["secrets"] == {"REDIS_URL": users.env(role), "STORE_KEY": SECRET}
        assert not {"REDIS_URL", "STORE_KEY"} & set(job["environment"])
        assert job["command"][-2:] == ["--set", "trainer.max_steps=7"]
        assert job["timeoutSeconds"] == 7200
    assert {job["labels"]["rollstream-role"]: job["flavor"] for job in hub.asked}["trainer"] == "h200"
    assert hub.tokens == {"Bearer hf_test"}


def test_more_generators_come_to_a_run_without_another_trainer(users: Users, hub: Hub) -> None:
    done = launch(users, "--no-trainer", "--generators", "1", "--scorers", "0", hub=hub)
    assert done.returncode == 0, done.stderr
    assert [job["labels"]["name"] for job in hub.asked] == ["my-run-generator-0"]


def test_a_refusal_repeats_no_secret(users: Users, hub: Hub) -> None:
    hub.refuses = True
    done = launch(users, hub=hub)
    assert done.returncode == 3
    assert "my-run-trainer-0: Hugging Face refuses it (HTTP 403)" in done.stderr
    assert without_secrets(done.stdout + done.stderr, users)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "trainer.max_stepz=1"], "trainer.max_steps"),
        (["--set", "redis.url=redis://u:hf_test@h"], "addresses come from --secrets"),
        (["--image", "no-role"], "--image no-role: write {role}"),
        (["--input", "folder"], "--input folder: write it as KIND:OWNER/NAME"),
        (["--records", "dataset:me/x"], "only a bucket can be written to"),
        (["--secret", "NOT_THERE"], "--secret NOT_THERE: there is no such variable"),
        (["--secrets", "/nowhere"], "write it with `python -m deploy.redis.users`"),
        (["--run", "a b"], "run.name = 'a b'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(users: Users, words: list[str], says: str) -> None:
    done = launch(users, *words, "--dry-run")
    assert done.returncode == 2
    assert says in done.stderr
    assert without_secrets(done.stderr, users)
