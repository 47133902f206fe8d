"""The process in which reward functions run: `python -m pipeline.rewards.child SOCKET_FD`.

In: calls, one at a time. Out: their values, or what went wrong. It may hang, crash or be killed at
any moment; the scorer notices and starts another. What functions print goes to standard error.
"""

from __future__ import annotations

import array
import asyncio
import inspect
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.errors import RewardLoadError
from pipeline.rewards import frames
from pipeline.rewards.columns import MissingColumnError
from pipeline.rewards.functions import (
    RewardFunction,
    load_function,
    message_of,
    missing_argument,
    place_of,
    said_by,
    traceback_of,
    try_on_row,
)

_FLOAT32_MAX = 3.4e38
_MAX_DETAIL_CHARS = 4000
_RESERVED = frozenset({"prompts", "completions", "completion_ids"})


class BadReturnError(Exception):
    """A function returned something else than one number or None for each completion."""


def main(fd: int) -> int:
    """Serve until the scorer closes the socket."""
    # A drain signals the whole process group or container, and calls in flight must end. Handlers,
    # unlike SIG_IGN, are not inherited by programs that a reward function starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _keep_running)
    with socket.socket(fileno=fd) as sock, asyncio.Runner() as runner:
        home = os.getpid()
        # A copy that holds the socket would hide from the scorer that this process has died.
        os.register_at_fork(after_in_child=sock.close)
        functions = _load(sock, home)
        while functions is not None and (frame := frames.receive(sock)) is not None:
            with _ending_copies(home):
                answer = _answer(functions[frame["reward"]], frame, runner)
            frames.send(sock, answer | {"number": frame["number"]})
    return 0


@contextmanager
def _ending_copies(home: int) -> Iterator[None]:
    """A copy that user code has forked ends where it would come back here; only `home` answers."""
    try:
        yield
    finally:
        if os.getpid() != home:
            os._exit(0)


def _keep_running(_number: int, _stack: object) -> None:
    """Signals are the scorer's business; it closes the socket when it is done."""


def _load(sock: socket.socket, home: int) -> list[RewardFunction] | None:
    order = frames.receive(sock)
    if order is None:
        return None
    sys.path.extend(entry for entry in order["path"] if entry not in sys.path)
    try:
        with _ending_copies(home):
            functions = [load_function(reward["function"], reward["kwargs"]) for reward in order["rewards"]]
            _try(functions, order)
    except RewardLoadError as error:
        problem = " ".join(str(error).split())  # one line, whatever the user's code raised
        frames.send(sock, {"number": order["number"], "error": problem})
        return None
    frames.send(sock, {"number": order["number"], "ready": True})
    return functions


def _try(functions: Sequence[RewardFunction], order: frames.Frame) -> None:
    """One empty completion of every row. Raises RewardLoadError."""
    for row in order["rows"]:
        arguments = _arguments(row | {"texts": [""], "token_ids": [b""]})
        for function, reward in zip(functions, order["rewards"], strict=True):
            try_on_row(function, reward["function"], _passed(function, arguments), row["where"])


def _passed(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the settings say goes before a column of the same name."""
    return {name: value for name, value in arguments.items() if name not in function.keywords}


def _answer(function: RewardFunction, frame: frames.Frame, runner: asyncio.Runner) -> frames.Frame:
    try:
        arguments = _arguments(frame)
        if (missing := missing_argument(function, arguments)) is not None:
            raise MissingColumnError(missing, arguments.keys() - _RESERVED)
        returned = function(**_passed(function, arguments))
        if inspect.isawaitable(returned):
            returned = runner.run(_awaited(returned))
        return {"values": _values(returned, [len(ids) for ids in arguments["completion_ids"]])}
    except (BadReturnError, MissingColumnError) as error:
        return {"error": str(error), "detail": "", "is_useless": True}
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is an answer
        detail = traceback_of(error)[-_MAX_DETAIL_CHARS:]
        return {"error": f"{said_by(error)}{place_of(error)}", "detail": detail}


async def _awaited(returned: Any) -> object:
    return await returned


def _arguments(frame: frames.Frame) -> dict[str, Any]:
    """The arguments that TRL passes: prompts, completions, completion_ids and every column."""
    prompt, texts = frame["prompt"], frame["texts"]
    is_chat = isinstance(prompt, list)
    columns = {
        name: [_fresh(value) for _ in texts] for name, value in frame["columns"].items() if name not in _RESERVED
    }
    return columns | {
        "prompts": [_fresh(prompt) for _ in texts],
        "completions": [[{"role": "assistant", "content": text}] if is_chat else text for text in texts],
        "completion_ids": [_unpacked(packed) for packed in frame["token_ids"]],
    }


def _fresh(value: Any) -> Any:
    """A copy, so that a function that changes one prompt in place does not change the others."""
    if isinstance(value, dict):
        return {key: _fresh(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_fresh(item) for item in value]
    return value


def _unpacked(packed: bytes) -> list[int]:
    ids = array.array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _values(returned: object, lengths: Sequence[int]) -> list[object]:
    """lengths: tokens of each completion."""
    num_completions = len(lengths)
    if not _is_list_like(returned):
        raise BadReturnError(
            f"returned {type(returned).__name__}; expected a list, with a number or None for each of the "
            f"{num_completions} completions"
        )
    items: list[object] = list(returned)  # type: ignore[call-overload]
    if len(items) != num_completions:
        raise BadReturnError(f"returned {len(items)} values for {num_completions} completions; expected one for each")
    return [
        _of_tokens(item, length) if isinstance(item, list | tuple) else _value(item)
        for item, length in zip(items, lengths, strict=True)
    ]


def _of_tokens(items: Sequence[object], length: int) -> object:
    """Rewards of single tokens, or what is wrong with them."""
    if len(items) != length:
        return {
            "error": f"returned {len(items)} values for the {length} tokens of a completion; "
            "expected one for each of its completion_ids, None where no step ends"
        }
    values = [_value(item) for item in items]
    wrong = next((value for value in values if isinstance(value, dict)), None)
    return {"tokens": values} if wrong is None else wrong


def _is_list_like(returned: object) -> bool:
    is_text_or_map = isinstance(returned, str | bytes | dict | set)
    return not is_text_or_map and hasattr(returned, "__len__") and hasattr(returned, "__iter__")


def _value(item: object) -> object:
    """A finite number, None, or what is wrong with the item."""
    if item is None:
        return None
    convert: Callable[[Any], float] | None = getattr(type(item), "__float__", None)
    if convert is None:
        return {"error": f"returned {type(item).__name__} for a completion; expected a number or None"}
    try:
        number = float(convert(item))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return {"error": f"returned {type(item).__name__} for a completion: {message_of(error)}"}
    if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
        return {"error": f"returned {number} for a completion; expected a finite number or None"}
    return number


def _run(arguments: Sequence[str]) -> int:
    return main(int(arguments[0]))


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
