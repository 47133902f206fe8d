"""A server that speaks vLLM's routes and does what a test says: real HTTP, no model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pipeline.engines.vllm_pull import WeightPull

SERVER_INFO: dict[str, Any] = {
    "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 128, "return_sampling_mask": False},
    "weight_transfer_config": {"backend": "rollstream"},
    "parallel_config": {"worker_extension_cls": "pipeline.engines.vllm_worker.Extension"},
    "scheduler_config": {"enable_chunked_prefill": False},
    "device_config": {"device": "cpu"},
}


class StandIn(ThreadingHTTPServer):
    """behave: what a request for tokens gets; the handler and the number of the request, from 1.

    num_requests: for tokens. num_trials: of these, for one that is only to prove that it can be had, which get it
    where `passes_trials`, and else what others get, as number 0. paths: of all requests. label: of the weights.
    refuses: paths that get a 500. ignores: paths that get no answer. is_healthy: what the server says of its engine.
    pull: what its worker fetches weights with; it then shares no memory with anybody. may_draw: unset while it is
    paused. is_aborting: what it draws ends. allowed: tokens that it may still draw, where a test counts them.
    """

    daemon_threads = True

    def __init__(self, behave: Callable[[Handler, int], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = behave
        self.num_requests = self.num_trials = 0
        self.passes_trials = True
        self.paths: list[str] = []
        self.label = "default"
        self.info = SERVER_INFO
        self.refuses: set[str] = set()
        self.ignores: set[str] = set()
        self.is_healthy = True
        self.pull: WeightPull | None = None
        self.headers: list[dict[str, str]] = []
        self.is_over = threading.Event()
        self.may_draw, self.is_aborting = threading.Event(), threading.Event()
        self.may_draw.set()
        self.allowed = threading.Semaphore(0)
        self._counting = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def counted(self) -> int:
        with self._counting:
            self.num_requests += 1
            return self.num_requests

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is what some tests want."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.headers.append(dict(self.headers))
        if self.path.startswith("/v1/models"):
            return self.send(200, {"data": [{"id": "tiny", "parent": None}]})
        if self.path.startswith("/server_info"):
            return self.send(200, {"vllm_config": self.server.info})
        if self.path == "/health":
            return self.send(200 if self.server.is_healthy else 503, {})
        return self.send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path == "/inference/v1/generate":
            return self.generate(body)
        if self.path in self.server.ignores:
            return self.hang()
        if self.path in self.server.refuses:
            return self.send(500, {"error": {"message": "it does not fit", "code": 500}})
        if self.server.pull is not None and self.path in {"/init_weight_transfer_engine", "/collective_rpc"}:
            return self.fetch(self.server.pull, body)
        if self.path == "/finish_weight_update" and body:
            self.server.label = body["weight_version"]
        if self.path.startswith("/pause"):
            self.server.may_draw.clear()
            if "mode=abort" in self.path:
                self.server.is_aborting.set()
        if self.path == "/resume":
            self.server.is_aborting.clear()
            self.server.may_draw.set()
        return self.send(200, {})

    def generate(self, body: dict[str, Any]) -> None:
        """What the test says, but to a request that only asks whether there is this route, or a token to be had."""
        if body["sampling_params"].get("temperature", 1) < 0:
            return self.send(400, {"error": {"message": "temperature must be non-negative", "code": 400}})
        self.body = body
        if body.get("stream"):
            return self.server.behave(self, self.server.counted())
        self.server.num_trials += 1
        return self.send(200, {}) if self.server.passes_trials else self.server.behave(self, 0)

    def fetch(self, pull: WeightPull, body: dict[str, Any]) -> None:
        """As the worker of a server elsewhere answers."""
        info = body.get("init_info", {})
        if "shared" in info:
            return self.send(500, {"error": {"message": "it cannot be mapped", "code": 500}})
        if "publisher" in info:
            pull.follow(info["publisher"], info["settings"], newer_than=info["newer_than"])
        return self.send(200, {"results": [pull.status]})

    def send(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self) -> None:
        """Begin a streamed answer; it ends when the connection does."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def event(self, token_ids: list[int], **more: object) -> None:
        """Some tokens, each with the logprob -0.5."""
        content = [{"token_id": token, "logprob": -0.5} for token in token_ids]
        choice = {"index": 0, "token_ids": token_ids, "logprobs": {"content": content}} | more
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        self.wfile.flush()

    def tokens(self, token_ids: list[int], *, reason: str = "length") -> None:
        """A whole answer in two events."""
        spans = [{"version": self.server.label, "start": 0, "end": len(token_ids)}]
        self.stream()
        self.event(token_ids[:1])
        self.event(token_ids[1:], finish_reason=reason, weight_versions=spans)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def draw(self, token_ids: list[int], *, per_event: int = 1) -> None:
        """One token for each that is allowed, so many in an event; paused, aborted and labelled as vLLM does it."""
        server, spans, waiting = self.server, [], []
        reason = "length"
        self.stream()
        for place, token in enumerate(token_ids):
            if not self.is_allowed():
                reason = "abort"
                break
            if not spans or spans[-1]["version"] != server.label:
                spans.append({"version": server.label, "start": place, "end": place})
            spans[-1]["end"] = place + 1
            waiting.append(token)
            if len(waiting) == per_event and place + 1 < len(token_ids):
                self.event(waiting)
                waiting = []
        self.event(waiting, finish_reason=reason, weight_versions=spans)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def is_allowed(self) -> bool:
        """Waits for a token that may be drawn; False where the request has been aborted."""
        server = self.server
        while not server.is_over.is_set():
            if server.is_aborting.is_set():
                return False
            if server.may_draw.is_set() and server.allowed.acquire(timeout=0.01):
                return True
        return False

    def hang(self) -> None:
        """Accept, and then nothing, until the test is over."""
        self.stream()
        self.server.is_over.wait(120)
        self.close_connection = True


@contextmanager
def stand_in(behave: Callable[[Handler, int], None]) -> Iterator[StandIn]:
    """Serves until the end of the block, or until `server_close`."""
    server = StandIn(behave)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def fine(handler: Handler, number: int) -> None:
    """Three tokens."""
    handler.tokens([5, 6, 7])


def slow(handler: Handler, number: int) -> None:
    """Three tokens, a while later."""
    time.sleep(0.3)
    handler.tokens([5, 6, 7])


def hanging(handler: Handler, number: int) -> None:
    """Nothing."""
    handler.hang()
