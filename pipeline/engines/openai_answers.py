"""What a vLLM server answers to a request for tokens, and what it says when it does not.

In: the events of a streamed answer, or a status and a body. Out: a `Segment`, or an error that says
whether another attempt can help.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pipeline.engines.vllm_outputs import Segment, finish_reason
from pipeline.errors import ConfigError, EngineError, RollstreamError

KEY_SETTING = "generation.openai.api_key_env"
_MAY_PASS = {408, 425, 429}
_NO_LOGPROB = -9999.0  # what the server writes for minus infinity and for what is no number
_DONE = b"[DONE]"


class PassingError(Exception):
    """Another attempt may help, here or at another server."""


class UnreachableError(PassingError):
    """There is no connection to the server."""


class WithdrawnError(PassingError):
    """The server went out of rotation while it was asked; the request has no part in that."""


class ForeignWeightsError(PassingError):
    """The server drew from weights that it was not given by this generator."""


class Answer:
    """One streamed answer of the route for tokens, as far as it has come.

    A server says at the end which weights drew which token. Until then that is known of the tokens that came
    before its weights were replaced, and of no others. version: that it has at the beginning; None: in question.
    """

    def __init__(self, version: int | None) -> None:
        self._version = version
        self._num_certain: int | None = None if version is not None else 0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._kept_ids: list[list[int]] = []
        self._final: dict[str, Any] | None = None

    def add(self, event: bytes) -> int:
        """Take the next event; returns the tokens in it. Raises EngineError, PassingError."""
        try:
            message = json.loads(event)
            if "error" in message:
                raise refusal(int(message["error"].get("code") or 500), event)
            return sum(self._add_choice(choice) for choice in message["choices"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PassingError(f"what it sent cannot be understood: {event[:200]!r}") from error

    def segment(self, known_versions: set[int]) -> Segment:
        """All of it. Raises EngineError, or PassingError where it broke off or is not of these versions."""
        final = self._final
        if final is None:
            raise PassingError("its answer broke off")
        if len(self._logprobs) != len(self._token_ids):
            raise PassingError(f"it gave {len(self._logprobs)} logprobs for {len(self._token_ids)} tokens")
        try:
            spans = _spans(final.get("weight_versions"), known_versions) if self._token_ids else []
        except ForeignWeightsError:
            self.distrust()
            raise
        stop = final.get("stop_reason")
        return Segment(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            spans=spans,
            reason=finish_reason(str(final["finish_reason"])),
            stop_text=stop if isinstance(stop, str) else "",
            kept_ids=self._kept_ids or None,
            experts=None,
        )

    def weights_change(self) -> None:
        """What comes from now on may be drawn by others."""
        if self._num_certain is None:
            self._num_certain = len(self._token_ids)

    def distrust(self) -> None:
        """Nobody knows what drew any of it."""
        self._num_certain = 0

    def so_far(self, most: int) -> Segment | None:
        """The tokens, at most so many, whose weights are known before the end; None for none."""
        number = min(len(self._token_ids), most)
        number = number if self._num_certain is None else min(number, self._num_certain)
        if not number or self._version is None or len(self._logprobs) != len(self._token_ids):
            return None
        return Segment(
            token_ids=self._token_ids[:number],
            logprobs=self._logprobs[:number],
            spans=[(self._version, 0)],
            reason=None,
            stop_text="",
            kept_ids=self._kept_ids[:number] or None,
            experts=None,
        )

    def _add_choice(self, choice: dict[str, Any]) -> int:
        token_ids = [int(token) for token in choice["token_ids"] or ()]
        found = (choice.get("logprobs") or {}).get("content") or ()
        self._token_ids += token_ids
        self._logprobs += [_logprob(entry["logprob"]) for entry in found]
        self._kept_ids += choice.get("sampling_mask") or []
        if choice.get("finish_reason") is not None:
            self._final = choice
        return len(token_ids)


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, without the last one that only says that it is the last."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data:").strip()
            if data and data != _DONE:
                yield data


def refusal(status: int, body: bytes, *, key_setting: str = KEY_SETTING) -> RollstreamError | PassingError:
    """The error for a status that is not 200: what may pass, what no attempt will mend, or a wrong setting."""
    text = _message(body)
    if status in _MAY_PASS or status >= 500:
        return PassingError(f"it answered {status}: {text}")
    if status in {401, 403} and "--enable-scale-out" in text:
        return ConfigError("it does not serve tokens; start it with --enable-scale-out")
    if status == 401:
        return ConfigError(f"it wants another API key: set the variable that {key_setting} names")
    return EngineError(f"it refused with {status}: {text}")


def _message(body: bytes) -> str:
    """What the server says, in whichever form: {"error": {"message": ...}}, {"error": ...}, {"detail": ...}, text."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body[:500].decode(errors="replace").strip()
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict):
        found = found.get("message", found)
    return str(found)[:500]


def _logprob(value: float) -> float:
    return float("-inf") if value <= _NO_LOGPROB else float(value)


def _spans(versions: Any, known: set[int]) -> list[tuple[int, int]]:
    if not versions:
        raise EngineError("it does not say which weights drew a token; vLLM 0.32 or newer is needed")
    labels = {str(span["version"]) for span in versions}
    strangers = labels - {str(version) for version in known}
    if strangers:
        raise ForeignWeightsError(f"it draws from weights that this generator did not give it: {sorted(strangers)}")
    return [(int(span["version"]), int(span["start"])) for span in versions]
