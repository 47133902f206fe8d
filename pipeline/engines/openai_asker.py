"""Questions to an OpenAI-compatible server, asked again while an answer may still come.

In: settings of a teacher or judge behind a URL. Out: the JSON of an answer. The API key is read from the
environment, goes into a header and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from pipeline.config.scoring import ModelAtWork
from pipeline.engines.openai_answers import PassingError, UnreachableError
from pipeline.engines.openai_checks import base_url, served_name
from pipeline.errors import ConfigError, EngineError, ScoringError, ServerAwayError, ServiceUnavailableError

_MAX_ATTEMPTS = 5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_LONGEST_LOOK_S = 5.0


class NoAnswerInTimeError(ScoringError):
    """Every attempt took too long."""


class RefusedError(ScoringError):
    """The server will not, however often it is asked."""


class Asker:
    """One server. Everything but the constructor belongs to one event loop.

    setting: how the settings are called, as in `scoring.judges[0]`. Raises ConfigError.
    """

    def __init__(self, settings: ModelAtWork, setting: str) -> None:
        from pipeline.engines.openai_http import Connection

        check_url(settings, setting)
        self._settings = settings
        self._setting = setting
        self._name = settings.model
        self._slots = asyncio.Semaphore(settings.max_concurrency)
        key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        missing = f"{setting}.url should name an OpenAI-compatible server"
        self._http = Connection(base_url(settings.url), key, key_setting=f"{setting}.api_key_env", missing=missing)

    async def start(self) -> None:
        """Ask which models it has, where it says so. Raises ConfigError, ServiceUnavailableError."""
        try:
            models = await self._patiently("GET", "/v1/models", {})
        except ConfigError as error:
            if "/v1/models" not in str(error):
                raise
            models = None
        except ScoringError as error:
            raise ServiceUnavailableError(str(error)) from error
        if models is None:
            if not self._name:
                raise self._wrong("the server does not list its models: name one with `model`")
            return
        try:
            self._name = served_name(models, self._name, setting=f"{self._setting}.model")
        except ConfigError as error:
            raise self._wrong(str(error)) from error
        except (LookupError, TypeError, AttributeError) as error:
            raise self._wrong(f"what it says of its models cannot be understood: {error!r}") from error

    @property
    def model(self) -> str:
        """The name under which the server has it, as far as that is known."""
        return self._name

    async def away(self) -> str:
        """Why nothing answers where the server should be; empty if something does, whatever it says."""
        try:
            async with asyncio.timeout(min(self._settings.timeout_s, _LONGEST_LOOK_S)):
                await self._http.get("/v1/models")
        except TimeoutError:
            return f"{self._where}: it does not answer /v1/models"
        except UnreachableError as problem:
            return f"{self._where}: {problem}"
        except (PassingError, EngineError, ConfigError):
            return ""
        return ""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer. Raises ConfigError, and after the last attempt ScoringError, of a kind that says why."""
        async with self._slots:
            return await self._patiently("POST", path, {"model": self._name, **body})

    async def close(self) -> None:
        """Break off what is under way. Safe to call twice."""
        await self._http.close()

    async def _patiently(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await (self._http.get(path) if method == "GET" else self._http.ask(path, body))
            except TimeoutError:
                error: ScoringError = NoAnswerInTimeError(
                    f"{self._where}: no answer to {path} in {self._settings.timeout_s:g} s, {attempt} times"
                )
            except UnreachableError as problem:
                error = ServerAwayError(f"{self._where}: {problem}")
            except PassingError as problem:
                error = ScoringError(f"{self._where}: {problem}")
            except EngineError as problem:
                raise RefusedError(f"{self._where}: {problem}") from problem
            except ConfigError as problem:
                raise self._wrong(str(problem)) from problem
            if attempt == _MAX_ATTEMPTS:
                break
            longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 4 ** (attempt - 1))
            await asyncio.sleep(random.uniform(longest / 2, longest))
        raise error

    @property
    def _where(self) -> str:
        return f"{self._setting}.url = {self._settings.url!r}"

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}: {problem}")


def check_url(settings: ModelAtWork, setting: str) -> None:
    """Raises ConfigError: a URL that is none, or no aiohttp."""
    if find_spec("aiohttp") is None:
        raise ConfigError(f'{setting}.url is set, but aiohttp is not installed: pip install "rollstream[openai]"')
    try:
        parts = urlsplit(settings.url)
        is_right = parts.scheme in {"http", "https"} and bool(parts.hostname)
        has_more = bool(parts.username or parts.query)
    except ValueError:
        is_right = has_more = False
    if not is_right or has_more:
        # What may hold a password is not repeated.
        shown = f" = {settings.url!r}" if not has_more else ""
        raise ConfigError(
            f"{setting}.url{shown} must look like http://host:port, without user, password and query; "
            f"an API key goes into the variable that {setting}.api_key_env names"
        )
