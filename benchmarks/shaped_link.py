"""A network of a given rate between a publisher and receivers of one machine.

In: a rate. Out: an address for the publisher, and what to put in front of a receiver's command. A
pair of virtual interfaces, one end in a network namespace of its own, whose queue lets no more
through; that needs root and iproute2. Everything is removed afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_MIN_BURST_BYTES = 256 * 1024  # a few of the packets that the kernel cuts only when they leave
_BURST_S = 0.001
_LATENCY = "20ms"  # of a full queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """host: what the publisher binds. through: leads a command to the other end. gbit: 0 for no limit."""

    host: str
    through: Sequence[str]
    gbit: float


LOOPBACK = Network(host="127.0.0.1", through=(), gbit=0.0)


def why_not() -> str:
    """Why no link can be shaped here; empty where one can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are missing: install iproute2"
    try:
        with network(1.0):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def network(gbit: float) -> Iterator[Network]:
    """Both directions at so many Gbit/s. Raises CalledProcessError where that is not permitted."""
    name = f"rs{os.getpid() % 100000}"
    near, far = f"{name}a", f"{name}b"
    subnet = f"10.213.{os.getpid() % 256}"
    burst = max(_MIN_BURST_BYTES, int(gbit * 1e9 / 8 * _BURST_S))
    shape = ["root", "tbf", "rate", f"{gbit}gbit", "burst", str(burst), "latency", _LATENCY]
    inside = ["ip", "netns", "exec", name]
    _do("ip", "netns", "add", name)
    try:
        _do("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _do("ip", "address", "add", f"{subnet}.1/24", "dev", near)
        _do("ip", "link", "set", near, "up")
        _do(*inside, "ip", "address", "add", f"{subnet}.2/24", "dev", far)
        _do(*inside, "ip", "link", "set", far, "up")
        _do("tc", "qdisc", "add", "dev", near, *shape)
        _do(*inside, "tc", "qdisc", "add", "dev", far, *shape)
        yield Network(host=f"{subnet}.1", through=inside, gbit=gbit)
    finally:
        subprocess.run(["ip", "link", "delete", near], check=False, capture_output=True)
        _do("ip", "netns", "delete", name)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
