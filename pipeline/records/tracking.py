"""Trackers beside metrics.jsonl: tensorboard, wandb, trackio.

In: metrics of each step. Out: the same numbers at the tracker. A tracker that is slow, down or
broken loses its own records, which are counted; it never delays or stops training.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import structlog

from pipeline.config import TrackingSettings
from pipeline.errors import ConfigError

_MAX_WAITING: Final = 1000
_CLOSE_S: Final = 10.0
_log = structlog.get_logger()

Numbers: TypeAlias = Mapping[str, float | Mapping[str, float]]


class Tracker(Protocol):
    """Where numbers are sent."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the numbers of one step."""

    def close(self) -> None:
        """Send what waits, and end."""


class BackgroundTracker:
    """Feeds a tracker from a thread of its own, so that neither its errors nor its waits are felt.

    open: makes the tracker, in that thread. num_lost: records it never got.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], Tracker],
        *,
        max_waiting: int = _MAX_WAITING,
        close_s: float = _CLOSE_S,
    ) -> None:
        self._name = name
        self._open = open
        self._close_s = close_s
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(max_waiting)
        self._is_failure_logged = False
        self.num_lost = 0
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Numbers) -> None:
        """Leave the numbers for the thread. Never waits; what finds no room is lost and counted."""
        try:
            self._waiting.put_nowait((step, _finite(metrics)))
        except queue.Full:
            self._lose(f"it is {self._waiting.maxsize} records behind")

    def close(self) -> None:
        """Wait a while for what is still to be sent."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=self._close_s)
            except queue.Full:
                self._lose("it did not take the last records")
                return
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._lose(f"it did not end within {self._close_s:g} s")

    def _run(self) -> None:
        try:
            tracker = self._open()
        except BaseException as error:  # noqa: BLE001 - a library may even call sys.exit
            self._lose(f"it did not start: {type(error).__name__}: {error}", count=0)
            tracker = None
        while (record := self._waiting.get()) is not None:
            if tracker is None:
                self.num_lost += 1
                continue
            self._attempt(tracker.log, *record)
        if tracker is not None:
            self._attempt(tracker.close)

    def _attempt(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, problem: str, *, count: int = 1) -> None:
        self.num_lost += count
        if not self._is_failure_logged:
            self._is_failure_logged = True
            _log.warning("tracker_failed", tracker=self._name, problem=problem, consequence="training goes on")


class _TensorBoard:
    """Event files below the run directory."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Weights & Biases. A restarted trainer goes on with the same run."""

    def __init__(self, project: str, run_dir: Path, run_name: str, config: Mapping[str, object]) -> None:
        import wandb

        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=run_name,
            id=_stored_id(run_dir / "wandb_run_id"),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )
        # wandb ignores steps that go backwards, which they do when a run resumes; a metric may.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """trackio, a local dashboard."""

    def __init__(self, project: str, run_name: str, config: Mapping[str, object]) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(project=project, name=run_name, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


def create_trackers(
    settings: TrackingSettings, run_dir: Path, run_name: str, config: Mapping[str, Any]
) -> list[BackgroundTracker]:
    """The trackers of `tracking.trackers`. Raises ConfigError for one that is not installed.

    config: the resolved configuration, JSON-able and without secrets; shown at the tracker.
    """
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: _TensorBoard(run_dir),
        "wandb": lambda: _Wandb(settings.project, run_dir, run_name, config),
        "trackio": lambda: _Trackio(settings.project, run_name, config),
    }
    require_trackers(settings)
    return [BackgroundTracker(name, openers[name]) for name in dict.fromkeys(settings.trackers)]


def require_trackers(settings: TrackingSettings) -> None:
    """Raises ConfigError for a tracker that is not installed."""
    for name in settings.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.trackers names {name!r}, which is not installed: "
                "pip install rollstream[tracking], or take it out of the list"
            )


def _finite(metrics: Numbers) -> dict[str, float]:
    """What a chart can show; what stands below a name gets it in front, as in eval_rewards/exact_match."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        below = {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
        flat.update({key: float(item) for key, item in below.items() if math.isfinite(item)})
    return flat


def _stored_id(path: Path) -> str:
    """One id per run directory, made on first use."""
    if not path.exists() or not path.read_text(encoding="utf-8").strip():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
