"""Logs: one event a line, a snake_case name and fields, for people or for machines.

In: worker settings and a role. Out: structlog on stderr, console or JSON; what libraries log at
warning or above comes the same way. Passwords in URLs are masked whoever wrote them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO, cast

import structlog

from pipeline.config import WorkerSettings

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from structlog.typing import EventDict, Processor, WrappedLogger

_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^\s/]*@", re.IGNORECASE)
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_COLOURS = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m"}


def configure(settings: WorkerSettings, role: str, worker: str, *, stream: TextIO | None = None) -> None:
    """Set up this process's logs; every line carries role and worker.

    On a console these two are left out: it shows one worker, or `up` puts a name in front.
    """
    out = stream or sys.stderr
    structlog.contextvars.clear_contextvars()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            *_renderer(settings, role, worker, out),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(settings.log_level),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Unfailing(out))),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_Libraries()]
    root.setLevel(logging.WARNING)


class _Unfailing:
    """A stream whose disk may be full, or whose reader gone, without ending the worker that writes to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write; what cannot be written is lost."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand over what is buffered."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def get_logger() -> BoundLogger:
    """The process's logger: `log.info("weights_applied", weight_version=7)`."""
    return cast("BoundLogger", structlog.get_logger())


def masked(text: str) -> str:
    """The text with user and password taken out of every URL in it."""
    return _USER_INFO.sub(r"\g<scheme>***@", text)


def _renderer(settings: WorkerSettings, role: str, worker: str, out: TextIO) -> list[Processor]:
    if settings.log_format == "json" or (settings.log_format == "auto" and not out.isatty()):
        return [
            _named(role, worker),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _mask,
            structlog.processors.JSONRenderer(default=str),
        ]
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        structlog.processors.format_exc_info,
        _mask,
        _console(has_colours=_has_colours(out)),
    ]


def _has_colours(out: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or out.isatty()


def _named(role: str, worker: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"role": role, "worker": worker, **event}

    return add


def _mask(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {key: _masked_value(value) for key, value in event.items()}


def _masked_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _masked_value(item) for name, item in value.items()}
    return masked(value) if isinstance(value, str) else value


def _console(*, has_colours: bool) -> Callable[[WrappedLogger, str, EventDict], str]:
    """One line: time, level, event, key=value; a traceback below it."""

    def render(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
        fields = dict(event)
        time, level, name = fields.pop("timestamp"), fields.pop("level"), fields.pop("event")
        trace = "\n".join(str(fields.pop(name)).rstrip() for name in ("traceback", "exception") if name in fields)
        pairs = " ".join(f"{key}={_value(value)}" for key, value in _flat(fields))
        line = f"{time} {level:<7} {name}"
        if has_colours:
            line = f"{_DIM}{time}{_RESET} {_COLOURS.get(level, '')}{level:<7}{_RESET} {name}"
            pairs = f"{_DIM}{pairs}{_RESET}" if pairs else ""
        line = f"{line} {pairs}".rstrip()
        return f"{line}\n{trace}" if trace else line

    return render


def _flat(fields: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Pairs; what stands below a name gets it in front, as in rewards.exact_match."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            yield key, value


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text or "\n" in text or not text else text


class _Libraries(logging.Handler):
    """Hands records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger().bind(logger=record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info or None)
