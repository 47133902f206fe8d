"""Reward functions of every kind that users write, good and bad."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.rewards import frames

CONSTANT = 3


def num_letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def sees_the_server(prompts: Any, completions: list[str], **columns: Any) -> list[bool]:
    """Whether the environment says where the queues are, or lacks the reward's own key."""
    seen = "REDIS_URL" in os.environ or "ROLLSTREAM_REDIS__URL" in os.environ
    return [seen or os.environ.get("REWARD_KEY") != "mine"] * len(completions)


async def concurrently(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    async def one(completion: str) -> float:
        await asyncio.sleep(0)
        return float(len(completion))

    return list(await asyncio.gather(*(one(completion) for completion in completions)))


def scaled(prompts: Any, completions: list[str], *, factor: float = 1.0, **columns: Any) -> list[float]:
    return [factor] * len(completions)


def even_only(prompts: Any, completions: list[str], **columns: Any) -> list[float | None]:
    return [float(len(completion)) if len(completion) % 2 == 0 else None for completion in completions]


def never_applies(prompts: Any, completions: list[str], **columns: Any) -> list[None]:
    return [None] * len(completions)


def zero(prompts: Any, completions: list[str], **columns: Any) -> list[int]:
    return [0] * len(completions)


def is_right(prompts: Any, completions: list[str], answer: list[str], **columns: Any) -> list[bool]:
    return [completion == right for completion, right in zip(completions, answer, strict=True)]


def raises(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    raise KeyError("no such thing")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


class _Odd:
    def __float__(self) -> float:
        raise ValueError("half of a pair: \ud800")


def raises_oddly(prompts: Any, completions: list[str], what: list[str], **columns: Any) -> list[Any]:
    """Errors that cannot be told as they are."""
    errors: dict[str, BaseException] = {
        "surrogate": ValueError("half of a pair: \ud800"),
        "mute": MuteError(),
        "endless": ValueError("x" * 10_000_000),
        "cancelled": asyncio.CancelledError("for reasons of its own"),
        "interrupt": KeyboardInterrupt(),
    }
    if what[0] == "value":
        return [_Odd()] * len(completions)
    raise errors[what[0]]


def raises_for_b(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    if "b" in completions:
        raise ValueError("b")
    return [1.0] * len(completions)


def hangs(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    threading.Event().wait()
    return []


def hangs_on_long(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    if any(len(completion) > 10 for completion in completions):
        threading.Event().wait()
    return [1.0] * len(completions)


def hangs_in_c(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """Catastrophic backtracking: the interpreter stays locked."""
    return [float(re.match(r"(a+)+$", "a" * 60 + "b") is None)]


def hangs_with_a_program(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    program = subprocess.Popen(["sleep", "1000"])
    sys.stderr.write(f"program {program.pid}\n")
    program.wait()
    return []


def starts_a_session(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """A program outside the process group; its number is the reward."""
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return [float(program.pid)] * len(completions)


def forks(prompts: Any, completions: list[str], *, ending: str = "returns", **columns: Any) -> list[float]:
    """The copy comes back before the original does."""
    copy = os.fork()
    if copy:
        _, status = os.waitpid(copy, 0)
        return [float(len(completion)) if status == 0 else -2.0 for completion in completions]
    if ending == "exits":
        sys.exit(1)
    if ending == "raises":
        raise KeyboardInterrupt
    return [-1.0] * len(completions)


def answers_twice(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """A second answer to the first call, written past the library."""
    for fd in range(3, 64):
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with sock:
            if sock.family == socket.AF_UNIX and "first" in completions and _is_of_the_scorer(sock):
                frames.send(sock, {"number": 2, "values": [-1.0] * len(completions)})
    return [float(len(completion)) for completion in completions]


def _is_of_the_scorer(sock: socket.socket) -> bool:
    """Blocking, unlike the sockets of an event loop."""
    return os.get_blocking(sock.fileno())


def fails_in_a_library(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    return [float(json.loads(completion)) for completion in completions]


def exits(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    sys.exit(3)


def dies(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    os._exit(7)


def is_killed(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def prints(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    print("x" * 100_000)  # noqa: T201
    os.write(1, b"\x00" * 100_000)
    return [1.0] * len(completions)


def waits_for_others(
    prompts: Any, completions: list[str], *, folder: str = "", num_others: int = 0, **columns: Any
) -> list[float]:
    """Returns once so many calls have been in here at the same time."""
    (Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) <= num_others:
        time.sleep(0.01)
    return [1.0] * len(completions)


def process_id(prompts: Any, completions: list[str], **columns: Any) -> list[int]:
    return [os.getpid()] * len(completions)


def returns_what_is_asked(prompts: Any, completions: list[str], what: list[Any], **columns: Any) -> Any:
    values = {"nan": float("nan"), "inf": float("inf"), "huge": 1e300, "text": "1.0", "none": None}
    if what[0] == "number":
        return 1.0
    if what[0] == "nothing":
        return None
    if what[0] == "dict":
        return dict.fromkeys(completions, 1.0)
    if what[0] == "too_many":
        return [1.0] * (len(completions) + 1)
    return [1.0, *[values[what[0]]] * (len(completions) - 1)]


def judges_tokens(
    prompts: Any, completions: list[str], completion_ids: list[list[int]], what: list[Any], **columns: Any
) -> list[Any]:
    """Every second token ends a step, worth its place; or something that is wrong."""
    if what[0] == "short":
        return [[0.5] * (len(ids) - 1) for ids in completion_ids]
    if what[0] == "text":
        return [["good"] * len(ids) for ids in completion_ids]
    return [[float(index) if index % 2 else None for index in range(len(ids))] for ids in completion_ids]


def sees(
    prompts: Any, completions: Any, completion_ids: list[list[int]], seen: list[Any], **columns: Any
) -> list[float]:
    """1 where the arguments are those that the test put into the column `seen`."""
    actual = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "columns": columns}
    return [float(actual == expected) for expected in seen]


def spoils_its_arguments(prompts: Any, completions: Any, tags: list[list[str]], **columns: Any) -> list[float]:
    sizes = []
    for prompt, tag in zip(prompts, tags, strict=True):
        prompt.append({"role": "user", "content": "more"})
        tag.append("more")
        sizes.append(float(len(prompt) + len(tag)))
    return sizes


class AClass:
    def __call__(self, prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        return [2.0] * len(completions)


an_instance = AClass()
a_partial = functools.partial(scaled, factor=5.0)


def without_columns(prompts: Any, completions: list[str]) -> list[float]:
    return [1.0]


def by_position(prompts: Any, completions: list[str], /, **columns: Any) -> list[float]:
    return [1.0]


def generates(prompts: Any, completions: list[str], **columns: Any) -> Any:
    yield 1.0
