"""One vLLM server that runs already: how it is asked, how it gets weights, and whether it can be relied on.

In: requests for tokens, and descriptions of weights. Out: segments with the versions that the server
itself recorded. A server in which something is not as it should be is out of rotation, and what it
was asked ends at once; it comes back with the newest weights or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import aiohttp

from pipeline.config import Config
from pipeline.engines import openai_updates as updates
from pipeline.engines.openai_answers import Answer, ForeignWeightsError, PassingError, WithdrawnError, events, refusal
from pipeline.engines.openai_checks import api_key, base_url, can_fetch, check_server, served_name
from pipeline.engines.openai_http import TOKENS, Connection
from pipeline.engines.openai_requests import Requests
from pipeline.engines.vllm_outputs import Segment
from pipeline.engines.vllm_worker import PATH
from pipeline.errors import ConfigError, RollstreamError
from pipeline.logs import get_logger
from pipeline.weights import Endpoints

_ANSWER_TIMEOUT_S = 10.0  # to questions that take no time
_MAX_FAILURES = 3  # answers that may pass, one after the other, until a server is taken out
_TOKENS_PER_EVENT = 16  # each event costs both sides about as much as a token of a small model

_OWN_EVERY_S, _OWNED_FOR_S = 4.0, 15.0
_LEAVE_TIMEOUT_S = 2.0  # for each thing that is asked of it at the end

log = get_logger()


class RemoteServer:
    """One server. Everything but the constructor belongs to one event loop.

    url: how it is named. trouble: why it is out of rotation; empty otherwise. doubt: why it was, until it has
    drawn a token since. weight_version: that it was given last. is_local: whether it can map memory of this
    process; None before it was asked.
    """

    def __init__(self, url: str, config: Config, *, context: int) -> None:
        self.url = base_url(url)
        self.trouble = "it was not asked yet"
        self.doubt = ""
        self.weight_version: int | None = None
        self.is_local: bool | None = None
        self.num_outstanding = 0
        self.num_tokens = 0
        self._config = config
        self._context = context
        self._model = ""
        self._http = Connection(self.url, api_key(config))
        self.while_healthy = self._http.while_healthy
        self._known_versions: set[int] = set()
        self._requests = Requests()
        self._halting = asyncio.Lock()
        self._num_failures = 0
        self._progress_at = time.monotonic()
        self._is_updating = False
        self._owner = uuid.uuid4().hex
        self._owned_at: float | None = None

    @property
    def is_connected(self) -> bool:
        """Whether it answers and is as it should be."""
        return not self.trouble

    @property
    def is_in_rotation(self) -> bool:
        """Whether it may be asked for tokens."""
        return not self.trouble and self.weight_version is not None and not self.doubt

    async def close(self) -> None:
        """Break off what is under way. Safe to call twice."""
        if self._owned_at is not None and not self.trouble:
            await self._http.attempt("/shutdown_weight_transfer_engine", _LEAVE_TIMEOUT_S)
        self._drop("the engine was closed")
        await self._http.close()

    # Connecting

    async def connect(self, probe: Mapping[str, Any], *, proof: str, is_to_own: bool) -> None:
        """Ask whether it is all that is needed. Raises ConfigError, PassingError.

        probe, proof: of `InitInfo`. is_to_own: for this process alone, as long as it looks after it.
        """
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                self._model = served_name(await self._http.get("/v1/models"), self._config.generation.openai.model)
                vllm = (await self._http.get("/server_info?config_format=json"))["vllm_config"]
                check_server(vllm, self._config, context=self._context)
                is_fetching = can_fetch(vllm)
                await self._check_tokens_route()
                self.is_local = await self._can_map(probe, proof)
        except (aiohttp.ClientError, OSError) as error:
            raise PassingError(f"it cannot be reached: {type(error).__name__}: {error}") from error
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise PassingError(f"what it says of itself cannot be understood: {error!r}") from error
        if not self.is_local and not is_fetching:
            raise ConfigError(
                "it shares no memory with this process, so its workers fetch weights themselves; "
                f"start it with --worker-extension-cls {PATH}"
            )
        if is_to_own:
            await self._own()
        self.trouble = ""

    async def look_after(self) -> None:
        """To be called again and again: keep it, and take it out where it is no longer as it should be."""
        self._check_progress()
        try:
            if self.is_connected:
                await self.while_healthy(self._own())
        except (PassingError, ConfigError) as error:
            self.take_out(str(error))

    async def _own(self) -> None:
        """Take it for this process alone, or keep it. Raises PassingError: another process has it."""
        self._check_ownership()
        now = time.monotonic()
        if self._owned_at is None or now - self._owned_at > _OWN_EVERY_S:
            await self._http.post("/init_weight_transfer_engine", {"init_info": {"owner": self._owner}})
            self._owned_at = now

    def _check_ownership(self) -> None:
        """After this process has stood still another may have given the server its weights."""
        if self._owned_at is not None and time.monotonic() - self._owned_at > _OWNED_FOR_S:
            self._requests.weights_change()

    async def _check_tokens_route(self) -> None:
        """A wrong request is refused; how, says whether the route is there."""
        async with self._http.tokens({"token_ids": [0], "sampling_params": {"temperature": -1}}) as response:
            error = refusal(response.status, await response.read())
        if response.status == 404:
            raise ConfigError("it has no route for tokens; vLLM 0.32 or newer is needed")
        if isinstance(error, ConfigError):
            raise error

    async def _can_map(self, probe: Mapping[str, Any], proof: str) -> bool:
        try:
            await self._http.post("/init_weight_transfer_engine", {"init_info": {"shared": probe, "proof": proof}})
        except PassingError:
            return False
        return True

    # Tokens

    def new_answer(self) -> Answer:
        """For `complete`, which is to be called at once."""
        return Answer(None if self._is_updating else self.weight_version)

    async def complete(self, token_ids: list[int], sampling: Mapping[str, Any], answer: Answer) -> Segment:
        """What the server draws behind `token_ids`. sampling: of vLLM's `SamplingParams`. answer: fills as it comes.

        Cancelling it ends the request at the server. Raises PassingError, EngineError, ConfigError.
        """
        self.num_outstanding += 1
        self._progress_at = self._progress_at if self._requests else time.monotonic()
        try:
            async with self._requests.asking(answer):
                segment = await self._streamed(token_ids, sampling, answer)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if self.trouble:
                raise WithdrawnError(f"{self.url}: {self.trouble}") from error
            self._note_failure(PassingError(f"the connection failed: {type(error).__name__}: {error}"))
            raise PassingError(f"{self.url}: {self.trouble or error!r}") from error
        except PassingError as error:
            self._note_failure(error)
            raise PassingError(f"{self.url}: {error}") from error
        except RollstreamError as error:
            raise type(error)(f"{self.url}: {error}") from error
        finally:
            self.num_outstanding -= 1
        self._num_failures = 0
        return segment

    async def _streamed(self, token_ids: list[int], sampling: Mapping[str, Any], answer: Answer) -> Segment:
        request = {
            "model": self._model,
            "token_ids": token_ids,
            # The salt keeps what an older version read out of the cache from being used for a newer one.
            "cache_salt": f"rollstream-{self.weight_version}",
            "sampling_params": {**sampling, "stream_interval": _TOKENS_PER_EVENT},
            "stream": True,
        }
        async with self._http.tokens(request) as response:
            if response.status != 200:
                raise refusal(response.status, await response.read())
            async for event in events(response.content.iter_any()):
                self._check_ownership()
                self.num_tokens += answer.add(event)
                self._progress_at = time.monotonic()
        return answer.segment(self._known_versions)

    async def try_out(self) -> None:
        """One that was out of rotation draws a token before it is asked for more. Raises PassingError, EngineError.

        It may answer whatever costs it nothing, and fail at this.
        """
        if self.doubt:
            stall_s = self._config.generation.openai.stall_s
            request = {"model": self._model, "token_ids": [0], "sampling_params": {"max_tokens": 1}}
            try:
                async with asyncio.timeout(stall_s):
                    await self._http.ask(TOKENS, request)
            except TimeoutError as error:
                raise PassingError(f"it was asked for a token and gave none in {stall_s:g} s") from error
            self.doubt = ""

    async def break_off(self) -> None:
        """End what it was asked for now, each with the server's word for what drew it, or in a while without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self._halting.acquire()
            try:
                await self._http.attempt(
                    "/pause?mode=abort&clear_cache=false", _LEAVE_TIMEOUT_S, self._requests.until_over
                )
                await self._http.attempt("/resume", _LEAVE_TIMEOUT_S)
            finally:
                self._halting.release()

    def _note_failure(self, error: PassingError) -> None:
        self._num_failures += 1
        is_foreign = isinstance(error, ForeignWeightsError)
        if is_foreign:
            self._requests.distrust()
        if is_foreign or self._num_failures >= _MAX_FAILURES:
            self.take_out(str(error))

    # Rotation

    def take_out(self, reason: str) -> None:
        """Out of rotation: what it was asked ends with PassingError now."""
        if reason != self.trouble:
            log.warning("server_out_of_rotation", url=self.url, reason=reason, num_requests=len(self._requests))
        self.doubt = reason
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        self.trouble, self.weight_version, self._num_failures, self._owned_at = reason, None, 0, None
        self._requests.end()

    def _check_progress(self) -> None:
        """Take it out where it has yielded nothing for too long."""
        stall_s = self._config.generation.openai.stall_s
        if self._requests and not self._is_updating and time.monotonic() - self._progress_at > stall_s:
            self.take_out(f"{len(self._requests)} requests got no token in {stall_s:g} s")

    # Weights

    async def fetch(
        self, newer_than: int, where: Callable[[], Awaitable[Endpoints]], settings: Mapping[str, Any]
    ) -> int:
        """Let its workers fetch a version above `newer_than`; returns which it is. Generation goes on.

        where: the trainer publishes, which may change meanwhile. Raises PassingError, and what `where` raises.
        It takes as long as it takes; put a limit around it.
        """
        started = time.monotonic()
        lora = self._config.lora.model_dump(mode="json") if self._config.merges_lora else None
        while True:
            info = {"publisher": asdict(await where()), "settings": settings, "newer_than": newer_than, "lora": lora}
            await self._http.post("/init_weight_transfer_engine", {"init_info": info})
            versions = await updates.fetched(self._http)
            newest = max((version for version in versions if version is not None), default=newer_than)
            if set(versions) == {newest} and newest > newer_than:
                return newest
            newer_than = max(newer_than, newest - 1)  # where they got different ones, the older are fetched anew
            # Each question halts the workers for an instant, so a long transfer is asked about less often.
            await asyncio.sleep(0.05 + 0.1 * (time.monotonic() - started))

    async def update(self, weight_version: int, update_info: Mapping[str, Any]) -> float:
        """Replace the weights between two tokens; returns the seconds that it stood still.

        Raises PassingError or TimeoutError. Nobody knows then which weights it has, and it stays paused.
        """
        started = time.perf_counter()
        self._is_updating = True
        self._requests.weights_change()
        try:
            async with self._halting:
                self._known_versions.add(weight_version)
                info = {**update_info, "owner": self._owner}
                await updates.replace(self._http, weight_version, info, self._config.generation.kv_on_update)
            self.weight_version = weight_version
        finally:
            self._is_updating = False
            self._progress_at = time.monotonic()
        return time.perf_counter() - started
