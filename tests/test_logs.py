"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
import os

import pytest
from pydantic import SecretStr

from pipeline.config import RedisSettings, WorkerSettings
from pipeline.logs import configure, get_logger, masked

pytestmark = pytest.mark.usefixtures("logging_as_before")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def logged(settings: WorkerSettings, stream: io.StringIO | None = None) -> io.StringIO:
    out = stream or io.StringIO()
    configure(settings, "scorer", "scorer-a", stream=out)
    return out


def test_json_lines_hold_event_fields_role_and_worker() -> None:
    out = logged(WorkerSettings(log_format="json"))
    get_logger().info("weights_applied", weight_version=7, seconds=1.2)
    line = json.loads(out.getvalue())
    assert line["event"] == "weights_applied"
    assert (line["role"], line["worker"], line["level"]) == ("scorer", "scorer-a", "info")
    assert (line["weight_version"], line["seconds"]) == (7, 1.2)


def test_auto_is_json_unless_on_a_terminal() -> None:
    out = logged(WorkerSettings())
    get_logger().info("started")
    assert json.loads(out.getvalue())["event"] == "started"
    out = logged(WorkerSettings(), Terminal())
    get_logger().info("started", run="r")
    assert "started" in out.getvalue()
    assert "{" not in out.getvalue()


def test_console_line_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = logged(WorkerSettings(log_format="console"))
    get_logger().warning("dead_letter", reason="not\nmsgpack", seconds=0.123456)
    (line,) = out.getvalue().splitlines()
    assert line.endswith(r"warning dead_letter reason='not\nmsgpack' seconds=0.1235")


def test_what_stands_below_a_field_is_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = logged(WorkerSettings(log_format="console"))
    get_logger().info("evaluation", rewards={"event": 0.5, "level": None}, dropped={})
    assert out.getvalue().endswith("info    evaluation rewards.event=0.5 rewards.level=None\n")


def test_a_traceback_stands_below_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = logged(WorkerSettings(log_format="console"))
    get_logger().warning("reward_failed", traceback="Traceback:\n  here\nKeyError: 'x'\n", num_failures=1)
    first, *below = out.getvalue().splitlines()
    assert first.endswith("warning reward_failed num_failures=1")
    assert below == ["Traceback:", "  here", "KeyError: 'x'"]


def test_colours_are_for_terminals_and_can_be_forced_or_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    settings = WorkerSettings(log_format="console")
    for stream, environ, expected in [
        (io.StringIO(), {}, False),
        (Terminal(), {}, True),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
    ]:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            out = logged(settings, stream)
            get_logger().info("started")
            assert ("\x1b[" in out.getvalue()) is expected


def test_less_severe_events_are_not_written() -> None:
    out = logged(WorkerSettings(log_format="json", log_level="warning"))
    get_logger().info("started")
    assert out.getvalue() == ""


def test_libraries_are_heard_from_warning_on() -> None:
    out = logged(WorkerSettings(log_format="json"))
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("look at %s", "this")
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["event"] == "look at this"
    assert json.loads(line)["logger"] == "some.library"


def test_passwords_never_appear() -> None:
    out = logged(WorkerSettings(log_format="json"))
    settings = RedisSettings(url=SecretStr("rediss://user:sesame@host:6379/0"))
    get_logger().info("redis_away", settings=settings, url=settings.url, error="at rediss://user:sesame@host:6379/0")
    try:
        raise ValueError("cannot reach redis://:sesame@host")
    except ValueError:
        get_logger().exception("worker_crashed")
    assert "sesame" not in out.getvalue()
    assert "rediss://***@host:6379/0" in out.getvalue()


def test_masking_takes_all_of_a_password_and_nothing_else() -> None:
    assert masked("redis://user:p@ss@host") == "redis://***@host"
    text = "a@b.c, redis://host:6379/0, http://h/x?mail=a@b"
    assert masked(text) == text


def test_a_log_whose_disk_is_full_ends_nobody() -> None:
    with open("/dev/full", "w", buffering=1, encoding="utf-8") as full:
        configure(WorkerSettings(log_format="json"), "scorer", "scorer-a", stream=full)
        get_logger().info("step", step=1)
        get_logger().error("worker_failed", error="what for")
        # What is still in the buffer would fail once more when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), full.fileno())
