"""Who may listen, and what a wrong address, port or key says."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import zmq
import zmq.auth
from structlog.testing import capture_logs

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError
from pipeline.metrics import Metrics
from pipeline.weights import WeightPublisher, WeightSubscriber
from pipeline.weights.account import Account
from pipeline.weights.channel import create_publisher
from pipeline.weights.relay import Relay
from pipeline.weights.security import load_keys
from tests.weights.states import FAST, at, make_state, next_within, same, until


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    """(file of the secret key, public key)."""
    public, secret = zmq.curve_keypair()
    path = tmp_path / "weights.key"
    path.write_text(secret.decode() + "\n")
    return str(path), public.decode()


def new_secret_key(path: Path) -> tuple[str, str]:
    """(public key, file of the secret key)."""
    public, secret = zmq.curve_keypair()
    path.write_bytes(secret)
    return public.decode(), str(path)


def new_shared_key(path: Path) -> str:
    path.write_text(secrets.token_hex(32) + "\n")
    return str(path)


def with_settings(**changes: object) -> WeightSettings:
    return FAST.model_copy(update=changes)


async def test_the_right_key_receives(keys: tuple[str, str]) -> None:
    path, public = keys
    with WeightPublisher(with_settings(server_secret_key_file=path)) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1))
        assert endpoints.public_key == public
        for settings in (FAST, with_settings(server_public_key=public)):
            async with WeightSubscriber(settings, resolve=at(endpoints)) as subscriber:
                assert same(await next_within(subscriber, None), make_state(1))


async def turned_away(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    """Wait until the publisher has refused this one, which has received nothing by then."""
    before = publisher.stats.server.num_turned_away
    waiting = asyncio.create_task(subscriber.next(None))
    await until(lambda: publisher.stats.server.num_turned_away > before)
    assert publisher.stats.server.num_manifests == 0
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_wrong_key_and_no_key_receive_nothing(keys: tuple[str, str]) -> None:
    path, _ = keys
    wrong = zmq.curve_keypair()[0].decode()
    with WeightPublisher(with_settings(server_secret_key_file=path)) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1))
        open_endpoints = type(endpoints)(
            announce=endpoints.announce, tiles=endpoints.tiles, session=endpoints.session, public_key=""
        )
        for settings, known in ((with_settings(server_public_key=wrong), endpoints), (FAST, open_endpoints)):
            async with WeightSubscriber(settings, resolve=at(known)) as subscriber:
                await turned_away(publisher, subscriber)


async def test_only_keys_on_the_list_receive(keys: tuple[str, str], tmp_path: Path) -> None:
    known_public, known = new_secret_key(tmp_path / "known.key")
    _, stranger = new_secret_key(tmp_path / "stranger.key")
    with WeightPublisher(with_settings(server_secret_key_file=keys[0], allowed_keys=[known_public])) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1))
        for settings in (FAST, with_settings(client_secret_key_file=stranger)):
            async with WeightSubscriber(settings, resolve=at(endpoints)) as subscriber:
                await turned_away(publisher, subscriber)
        async with WeightSubscriber(with_settings(client_secret_key_file=known), resolve=at(endpoints)) as subscriber:
            assert same(await next_within(subscriber, None), make_state(1))


def test_a_list_of_keys_without_encryption_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights\.allowed_keys.*weights\.server_secret_key_file"):
        WeightPublisher(with_settings(allowed_keys=["x" * 40]))


@pytest.mark.parametrize("key", ["", "#" * 40])
def test_a_list_with_what_is_no_key_is_refused(keys: tuple[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.allowed_keys = '"):
        WeightPublisher(with_settings(server_secret_key_file=keys[0], allowed_keys=[keys[1], key]))


def test_a_public_key_that_is_not_the_publishers_is_refused(keys: tuple[str, str]) -> None:
    path, public = keys
    WeightPublisher(with_settings(server_secret_key_file=path, server_public_key=public)).close()
    other = zmq.curve_keypair()[0].decode()
    with pytest.raises(ConfigError, match=r"weights\.server_public_key.*weights\.server_secret_key_file"):
        WeightPublisher(with_settings(server_secret_key_file=path, server_public_key=other))
    with pytest.raises(ConfigError, match=r"without weights\.server_secret_key_file"):
        create_publisher(with_settings(server_public_key=public), num_bytes=1, run="r")


async def silence(subscriber: WeightSubscriber) -> dict[str, Any]:
    """What a subscriber says when it gives a connection up."""
    with capture_logs() as logs:
        waiting = asyncio.create_task(subscriber.next(None))
        await until(lambda: any(entry["event"] == "weight_publisher_silent" for entry in logs))
        waiting.cancel()
        await asyncio.wait([waiting])
    return next(entry for entry in logs if entry["event"] == "weight_publisher_silent")


@pytest.mark.parametrize(
    ("host", "doubted"),
    [
        ("127.0.0.1", "the publisher has ended; or it is on another machine"),
        ("192.0.2.7", None),
    ],
)
async def test_a_silent_publisher_is_named_with_what_its_address_says_and_brings_no_key_into_doubt(
    host: str, doubted: str | None
) -> None:
    with WeightPublisher(FAST) as publisher:
        mine = publisher.start()
    # As of a publisher on another machine: nobody listens there any more.
    theirs = replace(
        mine, tiles=mine.tiles.replace("127.0.0.1", host), announce=mine.announce.replace("127.0.0.1", host)
    )
    async with WeightSubscriber(FAST, resolve=at(theirs)) as subscriber:
        said = await silence(subscriber)
    assert said["address"] == theirs.tiles
    assert ("may_be" in said) == (doubted is not None)
    assert doubted is None or doubted in said["may_be"]
    assert "key" not in said.get("may_be", "")


async def test_both_sides_name_the_settings_of_keys_that_do_not_fit(keys: tuple[str, str], tmp_path: Path) -> None:
    path, _ = keys
    known, _ = new_secret_key(tmp_path / "known.key")
    shared = new_shared_key(tmp_path / "shared")
    other = zmq.curve_keypair()[0].decode()
    cases: list[tuple[dict[str, object], dict[str, object], str, str]] = [
        ({"server_secret_key_file": path}, {"server_public_key": other}, "weights.server_public_key = ", "handshake"),
        ({"server_secret_key_file": path, "allowed_keys": [known]}, {}, "weights.client_secret_key_file", "handshake"),
        ({"shared_key_file": shared}, {}, "weights.shared_key_file", "unsigned"),
        ({}, {"shared_key_file": shared}, "weights.shared_key_file", "malformed"),
    ]
    for theirs, ours, doubted, reason in cases:
        with WeightPublisher(with_settings(**theirs)) as publisher:
            account = Account(publisher, Metrics("r", "trainer", "w"))
            endpoints = publisher.start()
            publisher.publish(make_state(1))
            async with WeightSubscriber(with_settings(**ours), resolve=at(endpoints)) as subscriber:
                assert doubted in (await silence(subscriber))["may_be"]
            with capture_logs() as logs:
                account.update()
                account.update()
            warning, *later = logs
            assert (warning["event"], warning["reason"]) == ("weights_not_given", reason)
            # Peers that are turned away may still try again meanwhile; that is worth a word when it has doubled.
            assert all(word["num"] >= 2 * warning["num"] for word in later)
            assert 1 <= warning["num"] <= publisher.stats.server.unwelcome[reason]
            assert doubted.split()[0] in warning["may_be"]


async def test_with_a_shared_key_only_its_holders_speak_to_each_other(tmp_path: Path) -> None:
    signed, other = (with_settings(shared_key_file=new_shared_key(tmp_path / name)) for name in ("ours", "theirs"))
    with WeightPublisher(signed) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1))
        for settings in (FAST, other):
            before = publisher.stats.server.num_unsigned
            async with WeightSubscriber(settings, resolve=at(endpoints)) as subscriber:
                waiting = asyncio.create_task(subscriber.next(None))
                await until(lambda before=before: publisher.stats.server.num_unsigned > before)
                assert not waiting.done()
                waiting.cancel()
                await asyncio.wait([waiting])
        stats = publisher.stats.server
        assert stats.num_manifests == 0
        assert stats.num_unsigned == stats.num_malformed >= 2
        async with WeightSubscriber(signed, resolve=at(endpoints)) as subscriber:
            assert same(await next_within(subscriber, None), make_state(1))


async def test_nobody_without_the_shared_key_is_believed(tmp_path: Path) -> None:
    signed = with_settings(shared_key_file=new_shared_key(tmp_path / "ours"))
    with WeightPublisher(FAST) as impostor:
        endpoints = impostor.start()
        impostor.publish(make_state(7))
        async with WeightSubscriber(signed, resolve=at(endpoints)) as subscriber:
            with pytest.raises(TimeoutError):
                await next_within(subscriber, None, seconds=0.7)
        assert impostor.stats.server.num_manifests == 0


@pytest.mark.parametrize("content", ["", "not hexadecimal", "ab" * 31])
def test_a_shared_key_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "shared.key"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"weights\.shared_key_file.*shared\.key.*64 hexadecimal digits"):
        WeightPublisher(with_settings(shared_key_file=str(path)))


async def test_a_subscriber_that_demands_encryption_takes_nothing_in_the_clear(keys: tuple[str, str]) -> None:
    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1))
        async with WeightSubscriber(with_settings(server_public_key=keys[1]), resolve=at(endpoints)) as subscriber:
            with pytest.raises(TimeoutError):
                await next_within(subscriber, None, seconds=0.7)


def test_key_files_of_zeromq_itself_are_read(tmp_path: Path) -> None:
    public_file, secret_file = zmq.auth.create_certificates(tmp_path, "weights")
    loaded = load_keys("server_secret_key_file", secret_file)
    assert loaded is not None
    assert loaded.public.encode() == zmq.auth.load_certificate(public_file)[0]
    assert loaded.secret.decode() not in repr(loaded)


@pytest.mark.parametrize("content", [None, b"", b"short", b"\xff" * 40, b"\x7f" * 40, b"#" * 40, b"\0" * 20_000])
def test_a_file_that_holds_no_key_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"weights\.server_secret_key_file.*weights\.key"):
        WeightPublisher(with_settings(server_secret_key_file=str(path)))


@pytest.mark.parametrize("key", ["short", "é" * 40, "\x7f" * 40, "#" * 40])
def test_a_public_key_that_is_none_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.server_public_key"):
        WeightSubscriber(with_settings(server_public_key=key), resolve=at(None))


@pytest.mark.parametrize("setting", ["port", "announce_port"])
def test_a_port_in_use_is_named(setting: str) -> None:
    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        taken = urlparse(endpoints.tiles).port
        with (
            WeightPublisher(with_settings(**{setting: taken})) as other,
            pytest.raises(ConfigError, match=rf"weights\.{setting} = {taken} is in use"),
        ):
            other.start()


def test_an_address_of_another_machine_is_named() -> None:
    with (
        WeightPublisher(with_settings(host="192.0.2.1")) as publisher,
        pytest.raises(ConfigError, match=r"weights\.host = '192\.0\.2\.1'"),
    ):
        publisher.start()


def test_listening_everywhere_needs_an_address_to_advertise() -> None:
    with (
        WeightPublisher(with_settings(host="0.0.0.0")) as publisher,
        pytest.raises(ConfigError, match=r"weights\.advertise"),
    ):
        publisher.start()


@pytest.mark.parametrize(
    ("host", "named"),
    [("0.0.0.0", r"weights\.relay_host = .*weights\.relay_advertise"), ("192.0.2.1", r"weights\.relay_host = ")],
)
def test_a_relay_that_cannot_listen_names_its_own_settings(host: str, named: str) -> None:
    relay = Relay(with_settings(relay=True, relay_host=host))
    with contextlib.closing(relay), pytest.raises(ConfigError, match=named):
        relay.start()


@pytest.mark.parametrize(("host", "advertise"), [("0.0.0.0", "127.0.0.1"), ("localhost", ""), ("::1", "")])
async def test_the_advertised_address_is_the_one_to_connect_to(host: str, advertise: str) -> None:
    with WeightPublisher(with_settings(host=host, advertise=advertise)) as publisher:
        try:
            endpoints = publisher.start()
        except ConfigError as error:
            pytest.skip(str(error))  # a machine without IPv6
        publisher.publish(make_state(1))
        async with WeightSubscriber(FAST, resolve=at(endpoints)) as subscriber:
            assert same(await next_within(subscriber, None), make_state(1))
