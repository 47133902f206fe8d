"""Keys of the weight channel: CURVE, which encrypts, and a shared key, which only signs.

In: the settings `weights.*_key_file`, `weights.server_public_key` and `weights.allowed_keys`. Out:
sockets that only speak to a peer who holds the right key, and a signer of headers. Secret keys never
appear in messages or logs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pipeline.config import LOOPBACK, WeightSettings
from pipeline.errors import ConfigError
from pipeline.messages import Endpoints
from pipeline.weights.protocol import HEADER_BYTES, Header

_KEY_CHARACTERS = 40  # 32 bytes in Z85
_SHARED_KEY_BYTES = 32
_SIGNATURE_BYTES = 32
_MAX_FILE_BYTES = 16 * 1024  # of a key, comments included


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """CURVE key pair, in Z85."""

    public: str
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """From now on `socket` accepts only peers that know the public key. Before bind."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public.encode()
        socket.curve_server = True


def load_keys(name: str, path: str) -> KeyPair | None:
    """Keys in the file `path`; None where it is empty.

    name: of the setting below `weights`. Raises ConfigError naming the setting.
    """
    return read_keys(path, f"weights.{name} = {path!r}") if path else None


def read_keys(path: str, what: str) -> KeyPair:
    """Keys in the file `path`: 40 characters in Z85, or a file of `zmq.auth.create_certificates`.

    Raises ConfigError that begins with `what`.
    """
    secret = _secret_in(_text_of(what, path)).encode()
    try:
        public = zmq.curve_public(secret).decode()
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"{what} holds no CURVE secret key: 40 characters in Z85, as `rollstream keys new` writes, "
            "or the .key_secret file that zmq.auth.create_certificates writes"
        ) from error
    return KeyPair(public=public, secret=secret)


def _text_of(setting: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"{setting} is no file of a key: it has more than {_MAX_FILE_BYTES // 1024} KiB")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} cannot be read: {error}") from error


def _secret_in(text: str) -> str:
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and name.strip() == "secret-key":
            return value.strip().strip('"')
    return text.strip()


def use_public_key(socket: zmq.Socket[Any], public_key: str, own: KeyPair | None = None) -> None:
    """`socket` speaks only to the publisher that holds the secret key. Before connect.

    own: what it shows of itself; None makes a pair for this connection, forgotten with it.
    """
    pair = zmq.curve_keypair() if own is None else (own.public.encode(), own.secret)
    socket.curve_publickey, socket.curve_secretkey = pair
    socket.curve_serverkey = public_key.encode()


def check_public_key(public_key: str, setting: str = "server_public_key") -> None:
    """Raises ConfigError unless `public_key` is a key in Z85."""
    try:
        is_key = len(z85.decode(public_key.encode("ascii"))) == 32
    except (ValueError, KeyError, struct.error):
        is_key = False
    if not is_key:
        raise ConfigError(
            f"weights.{setting} = {public_key!r} is not a CURVE public key: {_KEY_CHARACTERS} characters in Z85"
        )


def publisher_keys(settings: WeightSettings) -> KeyPair | None:
    """The publisher's own keys; None without. Raises ConfigError where these and what else it knows do not fit."""
    keys = load_keys("server_secret_key_file", settings.server_secret_key_file)
    for key in settings.allowed_keys:
        check_public_key(key, "allowed_keys")
    if settings.allowed_keys and keys is None:
        raise ConfigError(
            "weights.allowed_keys names CURVE keys, and without weights.server_secret_key_file nobody is asked "
            "for one: set it, or leave the list empty"
        )
    if not settings.server_public_key:
        return keys
    check_public_key(settings.server_public_key)
    if keys is not None and keys.public != settings.server_public_key:
        raise ConfigError(
            f"weights.server_public_key = {settings.server_public_key!r} is not the public key of "
            f"weights.server_secret_key_file = {settings.server_secret_key_file!r}, which is {keys.public!r}: "
            "generators with it would get nothing"
        )
    return keys


def receiver_keys(settings: WeightSettings) -> KeyPair | None:
    """A receiver's own keys; None without. Raises ConfigError, also for a public key that is none."""
    if settings.server_public_key:
        check_public_key(settings.server_public_key)
    return load_keys("client_secret_key_file", settings.client_secret_key_file)


def doubt(settings: WeightSettings, endpoints: Endpoints, *, is_foreign: bool, is_other: bool = False) -> str:
    """Which keys, or which address, may be why a receiver gets no answer; empty where nothing speaks for either.

    endpoints: what the publisher has said of itself. is_foreign: messages came that could not be read. is_other:
    such as were of another session.
    """
    ours, public_key = settings.server_public_key, endpoints.public_key
    if ours and ours != public_key:
        said = f"the publisher says that its key is {public_key!r}" if public_key else "the publisher has no key"
        return f"weights.server_public_key = {ours!r}, and {said}"
    reasons = []
    if is_other:
        reasons.append(
            "who answers there has another session than the endpoints name: they are of an earlier publisher, or a "
            "relay's own, which speaks in the name of the trainer's session"
        )
    if public_key:
        reasons.append("the publisher has weights.allowed_keys, without that of weights.client_secret_key_file here")
    if settings.shared_key_file or is_foreign:
        reasons.append("weights.shared_key_file is not the same on both sides")
    if urlsplit(endpoints.tiles).hostname in LOOPBACK and not is_other:
        reasons.append(
            "the publisher has ended; or it is on another machine, where weights.host has to be set: that address "
            "is of this machine alone"
        )
    return "; ".join(reasons)


class Doorkeeper:
    """Lets in only those whose public key is on the list, on all sockets of a context that speak CURVE.

    Before any of them binds; closed before the context is.
    """

    def __init__(self, context: zmq.Context[Any], allowed: Collection[str]) -> None:
        self._allowed = frozenset(key.encode() for key in allowed)
        self._authenticator = ThreadAuthenticator(context, log=logging.getLogger(__name__))
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of `key` may come in; the name is ZeroMQ's."""
        return key in self._allowed

    def close(self) -> None:
        """Safe to call twice."""
        self._authenticator.stop()


class Signer:
    """Headers as they go over the line: with a key each is followed by 32 bytes that prove it.

    A header names the hash of the whole object, so that nobody without the key can announce, offer or
    ask for anything. num_unsigned: headers that were read without the right signature.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self.num_unsigned = 0

    @classmethod
    def load(cls, path: str) -> Signer:
        """With the key in the file `path`, 64 hexadecimal digits; empty: without. Raises ConfigError."""
        if not path:
            return cls(None)
        setting = f"weights.shared_key_file = {path!r}"
        try:
            key = bytes.fromhex(_text_of(setting, path))
        except ValueError:
            key = b""
        if len(key) != _SHARED_KEY_BYTES:
            raise ConfigError(
                f"{setting} holds no shared key: {2 * _SHARED_KEY_BYTES} hexadecimal digits, "
                "as `rollstream keys new --shared` writes"
            )
        return cls(key)

    def write(self, header: Header) -> bytes:
        """The frame that carries it."""
        frame = header.pack()
        return frame if self._key is None else frame + self._sign(frame)

    def read(self, frame: bytes) -> Header | None:
        """The header in `frame`; None where it is none, or is not signed with the key."""
        if self._key is None:
            return Header.parse(frame)
        header = Header.parse(frame[:HEADER_BYTES])
        if header is not None and not hmac.compare_digest(frame[HEADER_BYTES:], self._sign(frame[:HEADER_BYTES])):
            self.num_unsigned += 1
            return None
        return header

    def _sign(self, frame: bytes) -> bytes:
        assert self._key is not None
        return hashlib.blake2b(frame, key=self._key, digest_size=_SIGNATURE_BYTES).digest()
