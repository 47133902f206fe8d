"""Connections to one vLLM server.

In: paths and bodies. Out: JSON, or a streamed answer; what goes wrong is a PassingError. The API key
goes into a header and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, TypeVar

import aiohttp

from pipeline.engines.openai_answers import KEY_SETTING, PassingError, UnreachableError, refusal
from pipeline.errors import ConfigError

TOKENS = "/inference/v1/generate"

_CONNECT_TIMEOUT_S = 10.0
_LOOK_EVERY_S, _HEALTH_TIMEOUT_S = 1.0, 10.0
# Refused, no such host, or silence, as of a machine that is off.
_NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_KEEP_ALIVE_S = 2.0  # vLLM closes what was idle for 5

Result = TypeVar("Result")


class Connection:
    """Opened with the first request. Belongs to one event loop.

    key_setting: that names the variable with the key. missing: what to do about a server that lacks a route.
    Raises ConfigError for a key that no header can hold.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        key_setting: str = KEY_SETTING,
        missing: str = "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
    ) -> None:
        self._url = url
        self._key_setting = key_setting
        self._missing = missing
        key = key.strip()  # files of secrets often end with a newline
        if not key.isprintable():
            raise ConfigError(
                f"the variable that {key_setting} names holds a line break or another character that no header "
                "can have: put the API key alone into it"
            )
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One attempt. Raises PassingError, ConfigError."""
        return await self._request("POST", path, body)

    async def attempt(self, path: str, within_s: float, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """The same, and what is to be waited for after it, for as long as that; it is left where it fails."""
        with contextlib.suppress(PassingError, ConfigError, TimeoutError):
            async with asyncio.timeout(within_s):
                await self.post(path)
                if then is not None:
                    await then()

    async def get(self, path: str) -> Any:
        """One attempt. Raises PassingError, ConfigError."""
        return await self._request("GET", path, None)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The same as `post`, but what no attempt will mend raises EngineError."""
        return await self._request("POST", path, body, is_patient=False)

    def tokens(self, body: Mapping[str, Any]) -> aiohttp.client._RequestContextManager:
        """A request for tokens, whose answer is read as it comes; raises what aiohttp raises."""
        return self._session("tokens").post(self._url + TOKENS, json=body)

    async def while_healthy(self, work: Coroutine[Any, Any, Result]) -> Result:
        """`work`, broken off with PassingError when the server says or shows that its engine has ended.

        It may have taken a question before, and then it never answers.
        """
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_EVERY_S))[0]:
                async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                    await self.get("/health")
            return task.result()
        except TimeoutError as error:
            raise PassingError("it says no longer whether it is healthy") from error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Break off what is under way. Safe to call twice."""
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, *, is_patient: bool = True) -> Any:
        try:
            async with self._session("control").request(method, self._url + path, json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            kind = UnreachableError if isinstance(error, _NO_CONNECTION) else PassingError
            raise kind(f"it does not answer {path}: {type(error).__name__}: {error}") from error
        if response.status == 404:
            raise ConfigError(f"it has no {path}: {self._missing}")
        if response.status != 200:
            refused = refusal(response.status, content, key_setting=self._key_setting)
            is_final = isinstance(refused, ConfigError) or not is_patient
            raise refused if is_final else PassingError(str(refused))
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError) as error:
            raise PassingError(f"its answer to {path} cannot be understood: {content[:200]!r}") from error

    def _session(self, purpose: Literal["tokens", "control"]) -> aiohttp.ClientSession:
        """Connections for tokens are used again, though not when the server is about to close them.

        The others are not: vLLM closes a connection on which it answered with an error.
        """
        if purpose not in self._sessions:
            if purpose == "tokens":
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            else:
                connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._sessions[purpose] = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                connector=connector,
            )
        return self._sessions[purpose]
