"""A server that speaks the OpenAI protocol and answers what a test says: real HTTP, no model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Behave: TypeAlias = Callable[[str, dict[str, Any], int], tuple[int, Any] | None]
"""Path, body, number of the request from 1 -> status and answer; None accepts and never answers."""


class Answering(ThreadingHTTPServer):
    """requests: path and body of each POST. keys: what came as Authorization."""

    daemon_threads = True

    def __init__(self, behave: Behave, models: tuple[str, ...], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.behave = behave
        self.models = models
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        self.is_over = threading.Event()
        self.counting = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is what some tests want."""


class _Handler(BaseHTTPRequestHandler):
    server: Answering
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.server.models:
            self._send(200, {"data": [{"id": name} for name in self.server.models]})
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        with self.server.counting:
            self.server.requests.append((self.path, body))
            self.server.keys.append(self.headers.get("Authorization") or "")
            number = len(self.server.requests)
        answer = self.server.behave(self.path, body, number)
        if answer is None:
            self.server.is_over.wait(120)
            self.close_connection = True
            return
        self._send(*answer)

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def answering(behave: Behave, *, models: tuple[str, ...] = ("tiny",), port: int = 0) -> Iterator[Answering]:
    """Serves until the end of the block. port: 0 takes a free one."""
    server = Answering(behave, models, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def says(text: str) -> tuple[int, Any]:
    """The answer of a chat."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}
