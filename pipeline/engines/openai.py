"""Generation on vLLM servers that run already, named by their URLs.

In: prompt groups and weights. Out: completions, each token with the logprob it was drawn at and the
version that drew it, as the server recorded it. Tokens travel over HTTP, weights never do: servers
on this machine map them, others fetch them from the trainer themselves.

    state --> checked --> shared memory --+--> each server: (fetch) --> pause --> apply --> label --> resume
                                          |       not reached, silent, other weights: out of rotation
    requests --> server with the fewest <-+------ back with the newest weights <------ asked again and again
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.engines.openai_answers import PassingError
from pipeline.engines.openai_checks import check_settings
from pipeline.engines.openai_group import GroupInFlight
from pipeline.engines.openai_probe import Probe
from pipeline.engines.shared_weights import SharedWeights
from pipeline.engines.vllm_model import ServedModel
from pipeline.errors import ConfigError, EngineError, EngineLostError, WeightError
from pipeline.logs import get_logger
from pipeline.messages import Completion, PartialGroup, PromptGroup
from pipeline.weights import Endpoints, WeightState

if TYPE_CHECKING:
    from pipeline.engines.openai_server import RemoteServer
    from pipeline.weights.address_watch import Resolve

_LONGEST_ABSENCE_S = 5.0  # between two looks at a server that is out of rotation
_LAST_UPDATE_S = 5.0  # that one which has begun may take when the engine is closed
_FETCH_SETTINGS = {  # key files are meant on the server's machine
    "store", "credits", "poll_s", "server_public_key", "client_secret_key_file", "shared_key_file", "max_model_bytes",
}  # fmt: skip

log = get_logger()


class OpenAiEngine:
    """A `GenerationEngine` in front of servers. resolve: where the trainer publishes its weights.

    is_interrupted: whether nothing is completed any more.
    """

    def __init__(self, config: Config, *, resolve: Resolve | None = None) -> None:
        check_settings(config)
        self._config = config
        self._settings = config.generation.openai
        self._resolve = resolve
        self._model: ServedModel | None = None
        self._servers: list[RemoteServer] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._updates: set[asyncio.Task[list[float]]] = set()
        self._groups: set[GroupInFlight] = set()
        self.is_interrupted = False
        self._newest: int | None = None
        self._shared, self._probe = SharedWeights(), Probe()
        self._description: dict[str, Any] = {}
        self._one_update = asyncio.Lock()
        self._rotation_changed = asyncio.Event()

    @property
    def weight_version(self) -> int | None:
        """Oldest version that is being served; None while no server has weights of this run."""
        versions = [server.weight_version for server in self._in_rotation() if server.weight_version is not None]
        return min(versions, default=None)

    @property
    def is_open(self) -> bool:
        """Whether servers may be asked."""
        return bool(self._keepers)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once, on all servers together."""
        return self._config.generation.max_num_seqs

    @property
    def num_unfinished_seqs(self) -> int:
        """Sequences accepted and not yet ended."""
        return sum(not task.done() for group in self._groups for task in group.tasks)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens received since the start."""
        return sum(server.num_tokens for server in self._servers)

    async def start(self) -> None:
        """Load the tokenizer and look at the servers; those that do not answer are asked again later.

        Raises ModelError, and ConfigError for a server that was started without what is needed.
        """
        from pipeline.engines.openai_server import RemoteServer

        self._model = model = await asyncio.to_thread(ServedModel.load, self._config)
        self._servers = [RemoteServer(url, self._config, context=model.context) for url in self._settings.urls]
        for server in self._servers:
            try:
                await self._connect(server)
            except PassingError as error:
                log.warning("server_not_reached", url=server.url, reason=str(error))
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self._servers]

    async def generate(self, prompt: PromptGroup, partial: PartialGroup | None = None) -> tuple[Completion, ...]:
        """`prompt.sampling.group_size` completions. Raises Interrupted, EngineError, or EngineLostError: no server."""
        model = self._model
        if model is None or not self._keepers or self._newest is None:
            raise EngineError("no verified weights are being served; apply_weights comes first")
        group = GroupInFlight.of(prompt, partial, model)
        if self.is_interrupted or not group.sequences:
            return group.completions([None] * len(group.sequences))
        group.tasks = [asyncio.create_task(group.complete(index, self)) for index in group.sequences]
        self._groups.add(group)
        try:
            await asyncio.wait(group.tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._groups.discard(group)
            for task in group.tasks:
                task.cancel()
            ended = await asyncio.gather(*group.tasks, return_exceptions=True)
        return group.completions(ended)

    async def interrupt(self) -> None:
        """End what is in flight with what there is of it; where a server does not help, with what is sure of that."""
        self.is_interrupted = True
        await asyncio.gather(*(server.break_off() for server in self._in_rotation() if server.num_outstanding))
        for task in [task for group in self._groups for task in group.tasks]:
            task.cancel()

    async def so_far(self) -> list[PartialGroup]:
        """What there is of the groups in flight, without a word to the servers."""
        found = []
        for group in self._groups:
            with contextlib.suppress(EngineError):  # what is wrong with it is said when it ends
                found.append(group.left())
        return found

    async def apply_weights(self, state: WeightState) -> float:
        """Check and copy while generation goes on, then replace on all servers at once; see the protocol.

        A server that does not reach the version is out of rotation until it has. Returns the longest
        pause of one. Waits for a server where none is there. Raises WeightError where all refused.
        """
        update = asyncio.create_task(self._update(state))
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)
        pauses = await asyncio.shield(update)
        while not pauses and self.weight_version is None and self._keepers:
            self._rotation_changed.clear()
            await self._rotation_changed.wait()
        return max(pauses, default=0.0)

    async def close(self) -> None:
        """Ask no server any more; what is in flight ends with EngineError. Safe to call twice."""
        if self._updates:
            await asyncio.wait(self._updates, timeout=_LAST_UPDATE_S)  # broken off, it would leave servers paused
        tasks, self._keepers = [*self._keepers, *self._updates], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.close()
        self._rotation_changed.set()
        self._shared.close()
        self._probe.close()

    # Generating

    async def least_loaded(self, avoided: Collection[RemoteServer]) -> RemoteServer:
        """Waits for a server where there is none. Raises EngineLostError when that takes too long.

        avoided: asked only where there is no other.
        """
        try:
            async with asyncio.timeout(self._settings.stall_s):
                while self._keepers and not self._in_rotation():
                    self._rotation_changed.clear()
                    await self._rotation_changed.wait()
        except TimeoutError as error:
            reasons = [server.trouble or server.doubt or "no weights yet" for server in self._servers]
            troubles = "; ".join(f"{server.url}: {why}" for server, why in zip(self._servers, reasons, strict=True))
            raise EngineLostError(f"no server for {self._settings.stall_s:g} s: {troubles}") from error
        if not self._keepers:
            raise EngineError("the engine was closed")
        return min(self._in_rotation(), key=lambda server: (server in avoided, server.num_outstanding))

    def _in_rotation(self) -> list[RemoteServer]:
        return [server for server in self._servers if server.is_in_rotation]

    # Weights

    async def _update(self, state: WeightState) -> list[float]:
        """The pause of each server that is there. Raises WeightError where none reached the version."""
        async with self._one_update:
            if not self._keepers or self._model is None:
                raise EngineError("the engine is not running")
            if self._newest is not None and state.weight_version < self._newest:
                raise WeightError(f"version {state.weight_version} is older than version {self._newest} being served")
            state = await asyncio.to_thread(self._model.checked, state)  # whole: nobody knows what a server had
            if any(server.is_local is not False for server in self._servers):
                self._description = await asyncio.to_thread(self._shared.write, state)
            self._newest = state.weight_version
            connected = [server for server in self._servers if server.is_connected]
            pauses = await asyncio.gather(*(self._reach(server) for server in connected))
            reached = [pause for pause in pauses if pause is not None]
            if connected and not reached:
                troubles = "; ".join(f"{server.url}: {server.trouble}" for server in connected)
                raise WeightError(f"no server could apply weights {state.weight_version}: {troubles}")
            return reached

    async def _reach(self, server: RemoteServer) -> float | None:
        """Bring a server to the newest version. None: it is out of rotation."""
        version = self._newest
        assert version is not None
        try:
            async with asyncio.timeout(self._settings.update_timeout_s):
                pause_s = await server.while_healthy(self._replace(server, version))
        except TimeoutError:
            server.take_out(
                f"it did not reach version {version} in generation.openai.update_timeout_s = "
                f"{self._settings.update_timeout_s:g}"
                + ("" if server.is_local else "; can it connect to weights.advertise (or weights.host)?")
            )
        except (PassingError, ConfigError, EngineError, WeightError) as error:
            server.take_out(f"it did not reach version {version}: {error}")
        else:
            self._rotation_changed.set()
            return pause_s
        return None

    async def _replace(self, server: RemoteServer, weight_version: int) -> float:
        if server.is_local:
            pause_s = await server.update(weight_version, {"shared": self._description})
        else:
            fetched = await self._fetched_by(server, weight_version)
            pause_s = await server.update(fetched, {"pulled": fetched})
        await server.try_out()
        return pause_s

    async def _fetched_by(self, server: RemoteServer, weight_version: int) -> int:
        """The version, this or a newer one, that the workers of a server elsewhere have fetched."""
        settings = self._config.weights.model_dump(mode="json", include=_FETCH_SETTINGS)
        return await server.fetch(weight_version - 1, self._publisher, settings)

    async def _publisher(self) -> Endpoints:
        endpoints = await self._resolve() if self._resolve is not None else None
        if endpoints is None:
            raise WeightError("it shares no memory with this process, and no trainer says where it publishes")
        return endpoints

    # Servers

    async def _connect(self, server: RemoteServer) -> None:
        try:
            await server.connect(self._probe.description, proof=self._probe.proof, is_to_own=True)
        except ConfigError as error:
            raise ConfigError(f"{server.url}: {error}") from error

    async def _keep(self, server: RemoteServer) -> None:
        """See to one server for as long as the engine lives: take it out when it stalls, bring it back after."""
        interval_s = wait_s = min(1.0, self._settings.stall_s / 5)
        while True:
            await asyncio.sleep(wait_s)
            if server.is_connected:
                await server.look_after()
            else:
                await self._bring_back(server)
            wait_s = interval_s if server.is_connected else min(2 * wait_s, _LONGEST_ABSENCE_S)

    async def _bring_back(self, server: RemoteServer) -> None:
        """Connect anew, and give it the newest weights; nothing else waits while it fetches them."""
        try:
            await self._connect(server)
            if self._newest is not None and not server.is_local:
                async with asyncio.timeout(self._settings.update_timeout_s):
                    await server.while_healthy(self._fetched_by(server, self._newest))
        except (PassingError, ConfigError, WeightError, TimeoutError) as error:
            server.take_out(str(error) or "its workers did not fetch the weights in time")
            return
        async with self._one_update:
            if self._newest is not None and await self._reach(server) is not None:
                log.info("server_in_rotation", url=server.url, weight_version=server.weight_version)
