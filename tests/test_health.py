"""The HTTP endpoints of a worker."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from pipeline.errors import ConfigError
from pipeline.messages import Json
from pipeline.worker.health import MAX_CLIENTS, HealthServer


class Truth:
    """Answers that a test can change."""

    is_live = True
    is_ready = False
    page: Json = None


@pytest.fixture
def served() -> Iterator[tuple[str, Truth]]:
    truth, registry = Truth(), CollectorRegistry()
    Gauge("rollstream_answer", "The answer.", registry=registry).set(42)
    server = HealthServer(
        "127.0.0.1",
        0,
        registry,
        lambda: truth.is_live,
        lambda: truth.is_ready,
        describe=lambda: {"role": "scorer", "waiting_for": "Redis"},
        pages={"/targets": lambda: truth.page},
    )
    yield server.start(), truth
    server.stop()


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_health_and_readiness_are_told_apart(served: tuple[str, Truth]) -> None:
    address, truth = served
    assert get(address, "/healthz")[0] == 200
    assert get(address, "/readyz")[0] == 503
    truth.is_live, truth.is_ready = False, True
    assert get(address, "/healthz")[0] == 503
    assert get(address, "/readyz")[0] == 200


def test_body_says_what_the_worker_waits_for(served: tuple[str, Truth]) -> None:
    assert json.loads(get(served[0], "/readyz")[1]) == {"role": "scorer", "waiting_for": "Redis"}


def test_metrics_are_served_and_other_paths_are_not(served: tuple[str, Truth]) -> None:
    assert "rollstream_answer 42.0" in get(served[0], "/metrics")[1]
    assert get(served[0], "/")[0] == 404


def test_a_page_that_has_nothing_to_say_yet_asks_to_come_again(served: tuple[str, Truth]) -> None:
    address, truth = served
    assert get(address, "/targets")[0] == 503
    truth.page = [{"targets": ["host:1"]}]
    assert get(address, "/targets") == (200, '[{"targets": ["host:1"]}]\n')
    assert "/targets" in get(address, "/")[1]


def test_a_client_that_says_nothing_keeps_no_one_waiting(served: tuple[str, Truth]) -> None:
    host, port = served[0].split(":")
    with socket.create_connection((host, int(port))):
        assert get(served[0], "/healthz")[0] == 200


def test_port_in_use_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HealthServer("127.0.0.1", port, CollectorRegistry(), lambda: True, lambda: True)
        with pytest.raises(ConfigError, match=f"worker.port = {port}"):
            server.start()


def test_stopping_twice_is_safe_and_frees_the_port() -> None:
    server = HealthServer("127.0.0.1", 0, CollectorRegistry(), lambda: True, lambda: True)
    host, port = server.start().split(":")
    server.stop()
    server.stop()
    with socket.create_server((host, int(port))):
        pass


def test_server_that_listens_everywhere_gives_an_address_others_can_use() -> None:
    server = HealthServer("0.0.0.0", 0, CollectorRegistry(), lambda: True, lambda: True)
    address = server.start()
    server.stop()
    assert address.startswith(f"{socket.gethostname()}:")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6_works() -> None:
    server = HealthServer("::1", 0, CollectorRegistry(), lambda: True, lambda: True)
    address = server.start()
    try:
        assert address.startswith("[::1]:")
        assert get(address, "/healthz")[0] == 200
    finally:
        server.stop()


def test_clients_that_say_nothing_give_way_to_those_who_ask(served: tuple[str, Truth]) -> None:
    address = served[0]
    host, port = address.split(":")
    silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(MAX_CLIENTS)]
    try:
        for _ in range(3):
            assert get(address, "/healthz")[0] == 200
        assert silent[0].recv(1) == b"", "who came first is sent away"
        silent[-1].sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert silent[-1].recv(12).endswith(b"200")
    finally:
        for client in silent:
            client.close()
