"""Keys of the encrypted weight channel (CURVE).

In: the settings `weights.server_secret_key_file` and `weights.server_public_key`. Out: sockets
that only speak to a peer who holds the right key. Secret keys never appear in messages or logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from pipeline.errors import ConfigError

_KEY_CHARACTERS = 40  # 32 bytes in Z85


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """CURVE key pair of a publisher, in Z85."""

    public: str
    secret: bytes

    def __repr__(self) -> str:
        return f"ServerKeys(public={self.public!r})"

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """From now on `socket` accepts only peers that know the public key. Before bind."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public.encode()
        socket.curve_server = True


def load_server_keys(path: str) -> ServerKeys | None:
    """Keys in the file `path`: 40 characters in Z85, or a file of `zmq.auth.create_certificates`.

    None where `path` is empty. Raises ConfigError naming the setting.
    """
    if not path:
        return None
    setting = f"weights.server_secret_key_file = {path!r}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} cannot be read: {error}") from error
    secret = _secret_in(text).encode()
    try:
        public = zmq.curve_public(secret).decode()
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"{setting} holds no CURVE secret key: 40 characters in Z85, "
            "or the .key_secret file that zmq.auth.create_certificates writes"
        ) from error
    return ServerKeys(public=public, secret=secret)


def _secret_in(text: str) -> str:
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and name.strip() == "secret-key":
            return value.strip().strip('"')
    return text.strip()


def use_public_key(socket: zmq.Socket[Any], public_key: str) -> None:
    """`socket` speaks only to the publisher that holds the secret key. Before connect.

    The socket's own key pair is made for this connection and forgotten with it.
    """
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = public_key.encode()


def check_public_key(public_key: str) -> None:
    """Raises ConfigError unless `public_key` is empty or a key in Z85."""
    try:
        is_key = not public_key or len(z85.decode(public_key.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeEncodeError):
        is_key = False
    if not is_key:
        raise ConfigError(
            f"weights.server_public_key = {public_key!r} is not a CURVE public key: {_KEY_CHARACTERS} characters in Z85"
        )
