"""A trainer's weights on their way out: under which number they go, and where generators find them.

In: a learner after a step. Out: a version on the weight channel, of which Redis knows. A trainer that was
replaced is refused before anyone hears of its weights.
"""

from __future__ import annotations

import asyncio
import time

from pipeline.errors import WeightError
from pipeline.learner import Learner
from pipeline.run.recovery import Recovery
from pipeline.weights.account import Account
from pipeline.weights.channel import create_publisher
from pipeline.worker.context import WorkerContext


class Publishing:
    """Of one trainer."""

    def __init__(self, context: WorkerContext, learner: Learner, recovery: Recovery) -> None:
        config = context.config
        self._context = context
        self._learner = learner
        self._recovery = recovery
        self._publisher = create_publisher(
            config.weights, num_bytes=learner.num_weight_bytes, run=f"{config.run.name}.{context.run_id}"
        )
        self._account = Account(self._publisher, context.metrics)

    async def open(self) -> None:
        """Be there, and say where. Raises WeightError, TrainerReplacedError."""
        self._endpoints = self._publisher.start()
        await self._say_where()

    async def publish(self, version: int) -> None:
        """The learner's weights, under this number. Raises WeightError, TrainerReplacedError."""
        context, started = self._context, time.monotonic()
        with context.busy_with("copying its weights"):
            state = await asyncio.to_thread(self._learner.export_weights, version)
        # First the number, then the weights: a trainer that dies in between leaves a number that is
        # never used, not weights whose number its successor would use again.
        self._recovery.remember(version)
        await context.fleet.set_version(version, trainer=context.worker_id)
        with context.busy_with("publishing its weights"):
            await asyncio.to_thread(self._publisher.publish, state)
        context.metrics.weight_publish_seconds.observe(time.monotonic() - started)
        context.metrics.weight_version.set(version)
        self._account.update()
        context.set_status(weight_version=version)

    async def look(self) -> None:
        """Count what was sent, and put the address back where Redis has another.

        Raises WeightError where nothing serves weights any more: nobody would get them, and perhaps nobody
        could generate what the next step waits for. Raises TrainerReplacedError.
        """
        if not self._publisher.is_serving:
            raise WeightError("nothing serves this trainer's weights any more; what was printed above says why")
        self._account.update()
        if await self._context.fleet.endpoints() != self._endpoints:
            self._context.log.warning("weights_address_put_back", reason="another one, or none, stood in Redis")
            await self._say_where()

    async def introduce_again(self, version: int) -> None:
        """Redis came back without the run: say once more which version there is, and where."""
        self._recovery.remember(version)
        await self._say_where()
        await self._context.fleet.set_version(version, trainer=self._context.worker_id)

    def close(self) -> None:
        """Serve nothing any more."""
        self._publisher.close()

    async def _say_where(self) -> None:
        await self._context.fleet.set_endpoints(self._endpoints, trainer=self._context.worker_id)
