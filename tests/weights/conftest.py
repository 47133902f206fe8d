"""An S3 server for the tests of weights, where one can be had."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.weights.stores import new_bucket, s3_server


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """Address of the session's S3 server."""
    if find_spec("moto") is None or find_spec("s3fs") is None:
        pytest.skip("moto and s3fs are not installed")
    with s3_server() as address:
        yield address


@pytest.fixture
def s3_store(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in a bucket of its own, reached as a user reaches it: through the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return f"s3://{new_bucket(s3_address)}/weights"


@pytest.fixture(params=["directory", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """`weights.store`, of each sort."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_store"))
    return str(tmp_path) if request.param == "directory" else f"memory://{tmp_path.name}-{id(request)}"
