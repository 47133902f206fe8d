"""Arrival: a worker finds Redis, joins its run and enters the registry.

In: configuration and a fresh worker. Out: the context for its body. It waits as long as it must
and can be told to give up at any moment; what a person must mend ends it at once.
"""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.logs import get_logger
from pipeline.metrics import Metrics
from pipeline.queues.connection import connect, passes, refusal
from pipeline.queues.leases import LeaseKeeper
from pipeline.roster import WaitCause
from pipeline.settings.files import fingerprint, server_name, show
from pipeline.streams import Streams
from pipeline.worker.context import WorkerContext
from pipeline.worker.heartbeat import Heartbeat
from pipeline.worker.state import REDIS, WorkerState

_RETRY_S = 0.5


class Arrival:
    """Brings one worker into its run. joins: False only watches and need not agree with the run."""

    def __init__(self, config: Config, state: WorkerState, metrics: Metrics, address: str, *, joins: bool) -> None:
        self._config = config
        self._state = state
        self._metrics = metrics
        self._address = address
        self._joins = joins

    async def enter(self, redis: Redis) -> WorkerContext | None:
        """The context, once Redis is there; None when the worker is told to end before that.

        Raises ConfigError when Redis refuses the worker, RunConflictError when the run does.
        """
        self._state.wait_for(REDIS, WaitCause.REDIS)
        context = self._context(redis)
        async with connect(self._config.redis, retries=0) as probe:
            while not self._state.draining.is_set():
                try:
                    if await self._state.unless_draining(self._register(probe, context)):
                        self._state.wait_for(None)
                        return context
                except (RedisError, OSError) as error:
                    if why := refusal(error):
                        raise ConfigError(f"{server_name(self._config.redis)}: {why}") from None
                    # Whatever else it says may pass: starting, loading, full, read-only, not there.
                    self._state.wait_for(f"{REDIS} ({error})", WaitCause.REDIS)
                await self._state.wait_for_any(timeout_s=_RETRY_S)
        return None

    async def rejoin(self, context: WorkerContext) -> str:
        """Make what the run needs in Redis, if it is not there; returns the run's id."""
        await context.streams.open()
        return await context.fleet.join(fingerprint(self._config), resolved=show(self._config))

    async def _register(self, probe: Redis, context: WorkerContext) -> bool:
        try:
            await probe.ping()
        except ResponseError as error:
            if passes(error) or refusal(error):
                raise
            server = server_name(self._config.redis)
            raise ConfigError(
                f"{server}: the server does not let this worker in ({error}): mend the URL (REDIS_URL), or what the "
                "server allows"
            ) from None
        if self._joins:
            context.run_id = await self.rejoin(context)
        context.state.control = await context.fleet.register(Heartbeat(context, self).info())
        return True

    def _context(self, redis: Redis) -> WorkerContext:
        keys = Keys(self._config.run.name)
        worker_id = self._state.worker_id
        streams = Streams(redis, keys, self._config.queues, consumer=worker_id)
        return WorkerContext(
            config=self._config,
            role=self._state.role,
            worker_id=worker_id,
            run_id="",
            redis=redis,
            keys=keys,
            streams=streams,
            keeper=LeaseKeeper(streams),
            fleet=Fleet(redis, keys),
            metrics=self._metrics,
            log=get_logger(),
            state=self._state,
            address=self._address,
        )
