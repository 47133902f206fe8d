"""One worker process seen from outside: its output, its process group, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

_MAX_LINE_BYTES = 1 << 20
_LAST_LINES_S = 2.0
_LOOK_EVERY_S = 0.02


async def buried(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process that was killed, even when cancelled: one that is left is no one's child."""
    end = asyncio.create_task(process.wait())
    cancelled: asyncio.CancelledError | None = None
    while not end.done():
        try:
            await asyncio.shield(end)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


@contextlib.asynccontextmanager
async def output_of(name: str, on_line: Callable[[str, str], None]) -> AsyncIterator[int]:
    """The file descriptor that a worker writes to; its lines are passed on.

    Not asyncio's own pipe: with that the end of a process is seen only when all that it has started
    has closed the pipe too.
    """
    read_fd, write_fd = os.pipe()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_fd, "rb", buffering=0)
    )

    async def pass_on() -> None:
        async for line in _lines(stream):
            on_line(name, line)

    try:
        # In a group: a line that cannot be passed on ends the run, it does not fill the pipe.
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(pass_on())
            try:
                yield write_fd
            finally:
                os.close(write_fd)
                # What has left the worker's process group may hold the pipe open for ever.
                await asyncio.wait([reader], timeout=_LAST_LINES_S)
                reader.cancel()
    finally:
        transport.close()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length; an endless one is cut."""
    rest = b""
    while chunk := await stream.read(65536):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")


def signal_group(pid: int, number: signal.Signals, *, leader_only: bool = False) -> None:
    """A worker leads a process group of its own; what it started ends with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if leader_only:
            os.kill(pid, number)
            return
        os.killpg(pid, number)


async def group_ended(pid: int, *, within_s: float) -> None:
    """Wait until a worker that has ended has nothing left in its group; what it started may notice by itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                os.killpg(pid, 0)
                await asyncio.sleep(_LOOK_EVERY_S)
