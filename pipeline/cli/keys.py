"""Commands about the keys of the weight channel: keys new, show.

In: a file name. Out: a secret in that file, readable by its owner alone, and what to set. No secret is ever printed.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from pipeline.errors import RollstreamError, UsageError

_OWNER_ONLY = 0o600


@click.group()
def keys() -> None:
    """Make keys for the weight channel."""


@keys.command("new")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--shared", "is_shared", is_flag=True, help="A key that signs and does not encrypt, the same for all.")
def new_key(file: Path, is_shared: bool) -> int:
    """Write a new secret key to FILE, which must not exist, and say where to name it."""
    import secrets

    import zmq

    if is_shared:
        _write(file, secrets.token_hex(32))
        _say(f'on every machine: weights.shared_key_file = "{file}"', file)
        return 0
    public, secret = zmq.curve_keypair()
    _write(file, secret.decode())
    _say(
        f"public key: {public.decode()}\n"
        f'for the trainer:  weights.server_secret_key_file = "{file}", and its public key for the generators as\n'
        f'                  weights.server_public_key = "{public.decode()}"\n'
        f'for a generator:  weights.client_secret_key_file = "{file}", and its public key for the trainer in\n'
        f'                  weights.allowed_keys = ["{public.decode()}"]',
        file,
    )
    return 0


def _say(text: str, file: Path) -> None:
    """Raises RollstreamError where it cannot be said of a key that is there."""
    try:
        click.echo(text)
    except OSError as error:
        raise RollstreamError(
            f"{file} is written and is a new key; how to use it could not be said ({error.strerror}): "
            f"`rollstream keys show {file}` prints the public key of one that encrypts"
        ) from error


@keys.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def show_key(file: Path) -> int:
    """Print the public key that belongs to the secret key in FILE."""
    from pipeline.weights.security import read_keys

    click.echo(read_keys(str(file), str(file)).public)
    return 0


def _write(file: Path, secret: str) -> None:
    try:
        target = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY), "w")
        try:
            with target:
                target.write(secret + "\n")
        except BaseException:
            file.unlink(missing_ok=True)
            raise
    except FileExistsError as error:
        raise UsageError(f"{file} exists already, and may be in use: choose another name, or remove it") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
