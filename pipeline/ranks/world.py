"""The ranks of one trainer, and all that they say to each other.

In: a place among them. Out: sums, broadcasts and gathers of tensors, and orders from rank 0. Alone,
every one of them gives back what it was given. Ranks have to ask for the same things in the same order.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import TrainerSettings
from pipeline.errors import ConfigError, RankLostError
from pipeline.ranks.place import Place

# Groups to train on may be long in coming; that rank 0 has died shows in its connection at once.
_WAITS = timedelta(days=3650)
_STORE_PATIENCE_S = 10.0


class World:
    """All ranks as one of them sees them. device: of this one."""

    def __init__(self, place: Place, device: torch.device, control: dist.ProcessGroup | None = None) -> None:
        self.place = place
        self.device = device
        self._control = control

    @classmethod
    def alone(cls, device: torch.device | None = None) -> World:
        """One rank."""
        return cls(Place(), device or torch.device("cpu"))

    @classmethod
    def join(cls, place: Place, trainer: TrainerSettings) -> World:
        """Meet the others; all have to come. Raises ConfigError, RankLostError."""
        device = device_of(place, trainer.device)
        if place.size == 1:
            return cls(place, device)
        backend = _require_backend(device)
        timeout = timedelta(seconds=trainer.collective_timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _look_for_store(os.environ)
        with collective():
            dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
            control = dist.new_group(backend="gloo", timeout=timeout if place.leads else _WAITS)
        return cls(place, device, control)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.place.size

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.place.rank

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.place.leads

    @property
    def is_alone(self) -> bool:
        """Whether there is no other."""
        return self.place.size == 1

    def use_device(self) -> None:
        """Which GPU is the current one belongs to a thread; to be called by every thread that computes."""
        if self.device.type == "cuda" and not self.is_alone:
            torch.cuda.set_device(self.device)

    def add(self, *tensors: Tensor) -> None:
        """Replace each by its sum over all ranks."""
        if not self.is_alone:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def largest(self, tensor: Tensor) -> None:
        """Replace each value by the largest of all ranks."""
        if not self.is_alone:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def from_leader(self, tensor: Tensor) -> None:
        """Replace it by that of rank 0."""
        if not self.is_alone:
            dist.broadcast(tensor, src=0)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank's after the other's. rows: [N, ...], N as each has it."""
        if self.is_alone:
            return rows
        number = torch.tensor([len(rows)], device=rows.device)
        numbers = [torch.zeros_like(number) for _ in range(self.size)]
        dist.all_gather(numbers, number)
        longest = max(int(each) for each in numbers)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return torch.cat([each[: int(length)] for each, length in zip(gathered, numbers, strict=True)])

    def tell(self, message: bytes) -> None:
        """Rank 0's word to all others."""
        assert self.leads, "only rank 0 has something to say"
        dist.broadcast(torch.tensor([len(message)]), src=0, group=self._control)
        if message:
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), src=0, group=self._control)

    def hear(self) -> bytes:
        """The next word of rank 0, however long it takes. Raises RankLostError when it is gone."""
        assert not self.leads, "rank 0 is told nothing"
        with collective():
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, src=0, group=self._control)
            message = torch.empty(int(length), dtype=torch.uint8)
            if len(message):
                dist.broadcast(message, src=0, group=self._control)
        return message.numpy().tobytes()

    def share(self, value: Any) -> Any:
        """What rank 0 has, on every rank: numbers, strings, lists and dicts with names."""
        if self.is_alone:
            return value
        if self.leads:
            self.tell(json.dumps(value).encode())
            return value
        return json.loads(self.hear())

    def leave(self) -> None:
        """Part from the others, once all are done."""
        if not self.is_alone and dist.is_initialized():
            dist.destroy_process_group()
            self._control = None


def _look_for_store(environ: Mapping[str, str]) -> None:
    """Where whoever started the ranks lets them meet. Raises RankLostError: it has gone since.

    torch would look for it for as long as ranks may take to answer.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # rank 0 makes it, and may come late
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    deadline = time.monotonic() + _STORE_PATIENCE_S
    while True:
        try:
            socket.create_connection((host, port), timeout=_STORE_PATIENCE_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"nobody answers at {host}:{port}, where ranks are to meet (MASTER_ADDR, MASTER_PORT): {error}; "
                    "has torchrun, or rank 0, ended?"
                ) from error
            time.sleep(0.5)
        else:
            return


def device_of(place: Place, setting: str) -> torch.device:
    """The device of one rank. setting: trainer.device. Raises ConfigError."""
    from pipeline.models.loading import resolve_device

    device = resolve_device(setting, setting="trainer.device")
    if place.size == 1 or device.type != "cuda":
        return device
    if ":" in setting:
        raise ConfigError(
            f"trainer.device = {setting!r} is one GPU, and the trainer has {place.size} ranks, each with a GPU of its "
            'own; set trainer.device = "auto"'
        )
    num_gpus = torch.cuda.device_count()
    if place.local_rank >= num_gpus:
        raise ConfigError(
            f"rank {place.rank} of the trainer has no GPU: torch sees {num_gpus}, and this is number "
            f'{place.local_rank + 1} on this machine; start fewer ranks, or set trainer.device = "cpu"'
        )
    return torch.device("cuda", place.local_rank)


def _require_backend(device: torch.device) -> str:
    """What ranks speak through. Raises ConfigError where this torch does not have it."""
    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if not has_gloo or (device.type == "cuda" and not has_nccl):
        lacks = "Gloo" if not has_gloo else "NCCL"
        raise ConfigError(
            f"a trainer on several ranks needs torch.distributed with {lacks}, which torch {torch.__version__} lacks: "
            "install a build that has it, or start the trainer without torchrun"
        )
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """What a rank says of others that are gone. Raises RankLostError."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if not _is_of_others(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RankLostError(
            f"another rank of this trainer has ended, or did not answer within trainer.collective_timeout_s: {reason}"
        ) from error


def _is_of_others(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
