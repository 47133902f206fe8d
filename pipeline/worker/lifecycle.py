"""The life of a worker process, the same for every role.

In: a role, its configuration and the body of its loop. Out: an exit code. On the way: logs, HTTP
endpoints, Redis waited for, the run joined, heartbeats, signals, and everything handed back at the
end. A worker leaves no lease, registry entry or thread behind.

    0 done or drained   1 crash   2 usage or configuration   4 drain timed out
    128 + n             stopped at once by a second signal, n
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable

from prometheus_client import disable_created_metrics
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.errors import RollstreamError, RunConflictError, UsageError
from pipeline.fleet import new_worker_id
from pipeline.logs import configure, get_logger, masked
from pipeline.metrics import Metrics
from pipeline.queues.connection import connect
from pipeline.roster import WaitCause
from pipeline.worker.arrival import Arrival
from pipeline.worker.context import WorkerContext
from pipeline.worker.health import HealthServer
from pipeline.worker.heartbeat import Heartbeat
from pipeline.worker.namesakes import name_similar_runs
from pipeline.worker.shutdown import ExitGuard, Shutdown, StoppedNowError, signals_as_before
from pipeline.worker.state import WorkerState
from pipeline.worker.wait_log import WaitLog

__all__ = ["WorkerContext", "run_worker"]

Body = Callable[[WorkerContext], Awaitable[None]]

_TURN_S = 0.5
_CANCEL_S, _LEAVE_S, _EXIT_S, _EXIT_NOW_S = 5.0, 5.0, 15.0, 2.0


def run_worker(role: str, config: Config, body: Body, *, joins: bool = True) -> int:
    """Live as a worker of `role` until `body` returns or the worker is told to end.

    joins: takes part in the run and must agree with its settings; False only watches.
    Returns the exit code; what went wrong is on stderr.
    """
    worker_id = new_worker_id(role)
    configure(config.worker, role, worker_id)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    guard = ExitGuard()
    with signals_as_before():
        code = _exit_code(lambda: asyncio.run(_Life(role, worker_id, config, body, guard, joins=joins).live()))
        guard.finish(code)
    return code


def _exit_code(live: Callable[[], None]) -> int:
    try:
        live()
    except KeyboardInterrupt:
        return 130
    except UsageError as error:
        _say_why(str(error))
        return error.exit_code
    except RollstreamError as error:
        get_logger().error("worker_failed", error=str(error))
        _say_why(str(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the last word of a process is its exit code
        get_logger().exception("worker_crashed")
        _say_why(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _say_why(error: str) -> None:
    """The last line of a worker that failed, the same in every log format; `up` tells crashes apart by it."""
    with contextlib.suppress(OSError):  # the exit code says it, too
        sys.stderr.write(f"error: {_in_one_line(error)}\n")


def _in_one_line(error: str) -> str:
    """Without secrets, too."""
    return masked(" ".join(error.split()))


def _why(error: BaseException) -> str:
    """What others are told of a worker that has failed; nothing of one that was ended."""
    if isinstance(error, StoppedNowError) or not isinstance(error, Exception):
        return ""
    return _in_one_line(str(error) if isinstance(error, RollstreamError) else f"{type(error).__name__}: {error}")


class _Life:
    """One worker from birth to death."""

    def __init__(self, role: str, worker_id: str, config: Config, body: Body, guard: ExitGuard, *, joins: bool) -> None:
        self._config = config
        self._body = body
        self._guard = guard
        self._joins = joins
        self._log = get_logger()
        self._metrics = Metrics(config.run.name, role, worker_id)
        self._state = WorkerState(role, worker_id)
        self._metrics.waiting_seconds.set_function(lambda: self._state.waited_s)
        self._shutdown = Shutdown(self._state.draining, self._drain)
        is_exporter = role == "exporter"
        self._health = HealthServer(
            config.worker.host,
            config.exporter.port if is_exporter else config.worker.port,
            self._metrics.registry,
            self._state.is_live,
            self._state.can_work,
            describe=self._state.describe,
            pages=self._state.pages,
            setting="exporter.port" if is_exporter else "worker.port",
        )

    async def live(self) -> None:
        """Everything, in order. Raises what ended the worker."""
        with self._shutdown.installed():
            address = self._health.start()
            try:
                async with connect(self._config.redis) as redis:
                    await self._live_on(
                        redis, Arrival(self._config, self._state, self._metrics, address, joins=self._joins)
                    )
            finally:
                self._health.stop()

    async def _live_on(self, redis: Redis, arrival: Arrival) -> None:
        try:
            async with asyncio.TaskGroup() as background:
                tasks = [background.create_task(self._turn()), background.create_task(self._shutdown.watch_parent())]
                context = await arrival.enter(redis)
                if context is not None:
                    await self._work(context, arrival)
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _cause(group) from None

    async def _work(self, context: WorkerContext, arrival: Arrival) -> None:
        self._log.info("started", run=self._config.run.name, address=context.address)
        why_failed = ""
        try:
            async with asyncio.TaskGroup() as group, context.keeper:
                heart = group.create_task(Heartbeat(context, arrival).run(), name="heartbeat")
                looking = group.create_task(name_similar_runs(context))
                await self._run_body(context)
                heart.cancel()
                looking.cancel()
        except BaseExceptionGroup as group:
            why_failed = _why(_cause(group))
            raise
        finally:
            self._guard.start(_EXIT_S)
            await self._leave(context, why_failed)

    async def _run_body(self, context: WorkerContext) -> None:
        """The body, until it returns or must end."""
        if context.draining.is_set():
            return
        work = asyncio.ensure_future(self._body(context))
        end = asyncio.ensure_future(self._shutdown.until_it_must_end(self._config.worker.drain_timeout_s))
        try:
            await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise self._ended_by(end.result())
            work.result()
            self._guard.code = 0
        finally:
            end.cancel()
            work.cancel()
            await asyncio.wait([work], timeout=_CANCEL_S)

    def _ended_by(self, error: RollstreamError) -> RollstreamError:
        """Whatever still runs has a short time to notice."""
        self._guard.code = error.exit_code
        self._guard.start(_EXIT_NOW_S if isinstance(error, StoppedNowError) else _EXIT_S)
        return error

    async def _leave(self, context: WorkerContext, why_failed: str) -> None:
        """Hand back leases and lock, and leave the registry. Without Redis the leases lapse by themselves."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                num_released = await context.streams.release_all() if self._joins else 0
                if context.holds_trainer_lock:
                    await context.fleet.release_trainer(context.worker_id)
                await context.fleet.deregister(context.worker_id, role=context.role, why_failed=why_failed)
        except (RedisError, OSError, RunConflictError) as error:
            self._log.warning("left_without_redis", error=str(error) or type(error).__name__)
            return
        self._log.info("left", groups_handed_back=num_released)

    def _drain(self, reason: str) -> None:
        if not self._state.draining.is_set():
            self._log.info("draining", reason=reason)
        self._state.drain()

    async def _turn(self) -> None:
        """Shows that the loop goes round, and says what is waited for."""
        waits, state = WaitLog(), self._state
        while True:
            state.turned()
            if waits.is_due(state.waiting_for, state.waited_s):
                say = self._log.warning if state.wait_cause is WaitCause.REDIS else self._log.info
                say("waiting", waiting_for=state.waiting_for, seconds=round(state.waited_s), run=self._config.run.name)
            await asyncio.sleep(_TURN_S)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception to report: what the user can mend first, then what was raised first."""
    leaves: list[BaseException] = []
    rest: list[BaseException] = [group]
    while rest:
        error = rest.pop(0)
        if isinstance(error, BaseExceptionGroup):
            rest = [*error.exceptions, *rest]
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, UsageError)), leaves[0])
