"""TLS to the server: with the certificates, settings and addresses of deploy/redis a real run ends well."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as Unreachable

from tests.deploy.servers import REDIS_FOLDER, Users, make_users, reserved_port, serving
from tests.integration.harness import SCRIPTED, running

CERTIFICATES = REDIS_FOLDER / "certificates.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encrypted:
    """A server that speaks TLS only, for the users of one run."""

    run: str
    users: Users
    folder: Path
    port: int


@pytest.fixture
def encrypted(short_path: Path, run_name: str) -> Iterator[Encrypted]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    make_certificates(short_path / "tls", "localhost", "127.0.0.1")
    with reserved_port() as port:
        server = f"localhost:{port}"
        authority = str(short_path / "tls/ca.crt")
        users = make_users(short_path / "users", run_name, "--server", server, "--tls", "--ca", authority)
        words = ["--include", str(REDIS_FOLDER / "tls.conf"), "--tls-port", str(port)]
        with serving(program, short_path, users, *words, url=users.env("operator")):
            yield Encrypted(run=run_name, users=users, folder=short_path, port=port)


async def test_a_run_over_tls_ends_well(encrypted: Encrypted, tmp_path: Path) -> None:
    users = encrypted.users
    async with running(tmp_path, users.env("operator"), encrypted.run, *SCRIPTED, "trainer.max_steps=3") as run:
        for role in ("exporter", "generator", "scorer", "trainer"):
            run.start(role, f"redis.url={users.env(role)}")
        await run.until_over()
        assert (await run.ledger()).trained == 3 * 4
        secret = users.env("trainer").partition("@")[0].rpartition(":")[2]
        assert all(secret not in worker.output for worker in run.workers)


def test_who_does_not_trust_the_authority_says_nothing(encrypted: Encrypted) -> None:
    make_certificates(encrypted.folder / "other", "localhost")
    url = encrypted.users.env("operator").replace("tls/ca.crt", "other/ca.crt")
    with Redis.from_url(url) as client, pytest.raises(Unreachable, match="certificate verify failed"):
        client.ping()


def test_a_server_of_another_name_is_not_believed(encrypted: Encrypted) -> None:
    url = encrypted.users.env("operator").replace("@localhost:", "@127.0.0.2:")
    with Redis.from_url(url) as client, pytest.raises(Unreachable):
        client.ping()


def test_without_tls_nobody_is_answered(encrypted: Encrypted) -> None:
    url = encrypted.users.env("operator").replace("rediss://", "redis://").partition("?")[0]
    with Redis.from_url(url, socket_timeout=5) as client, pytest.raises(Unreachable):
        client.ping()


def test_keys_are_for_their_owner_and_are_not_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", "host")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()}
    assert modes == {"ca.crt": 0o644, "ca.key": 0o600, "server.crt": 0o644, "server.key": 0o600}
    again = subprocess.run([CERTIFICATES, tmp_path / "tls", "host"], capture_output=True, text=True, check=False)
    assert (again.returncode, "there already" in again.stderr) == (2, True)


def make_certificates(folder: Path, *hosts: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run([CERTIFICATES, folder, *hosts], check=True, capture_output=True)
