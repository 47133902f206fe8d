"""Health: /healthz, /readyz and /metrics of one worker, from a thread of its own.

In: a registry and a view of the worker. Out: answers within moments, however long the step is
that the worker is in. It reads; it never changes or waits for anything of the worker's.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pipeline.errors import ConfigError
from pipeline.messages import Json

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_OK, _UNAVAILABLE, _NOT_FOUND = "200 OK", "503 Service Unavailable", "404 Not Found"
_CLIENT_TIMEOUT_S = 10.0
MAX_CLIENTS = 64
_EVERYWHERE = {"0.0.0.0", "::"}


class HealthServer:
    """Serves one worker's state over HTTP.

    port: 0 takes a free one. describe: what the bodies of /healthz and /readyz say. pages: path -> what it
    answers, as JSON; None for "ask again later". setting: name of the port's setting, for the error.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
        *,
        describe: Callable[[], Mapping[str, Json]] = dict,
        pages: Mapping[str, Callable[[], Json]] | None = None,
        setting: str = "worker.port",
    ) -> None:
        self._host, self._port, self._setting = host, port, setting
        self._registry = registry
        self._checks = {"/healthz": is_live, "/readyz": is_ready}
        self._describe = describe
        self._pages = {} if pages is None else pages
        self._server: _Server | None = None
        self._thread: Thread | None = None

    def start(self) -> str:
        """Begin to serve. Returns host:port, as others reach it. Raises ConfigError when the port is taken."""
        try:
            server = _server_for(self._host)((self._host, self._port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"{self._setting} = {self._port}: cannot listen on {self._host}:{self._port} "
                f"({error.strerror or error}); choose another port, or 0 for a free one"
            ) from error
        server.set_app(self._answer)
        self._server = server
        self._thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True)
        self._thread.start()
        host = socket.gethostname() if self._host in _EVERYWHERE else self._host
        return f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"

    def stop(self) -> None:
        """Stop serving and join the thread. Safe to call twice."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server = self._thread = None

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return _send(start_response, _OK, CONTENT_TYPE_LATEST, generate_latest(self._registry))
        page = self._pages.get(path)
        if page is not None:
            answer = page()
            return _send(start_response, _UNAVAILABLE if answer is None else _OK, "application/json", _json(answer))
        check = self._checks.get(path)
        if check is None:
            known = " ".join([*self._checks, "/metrics", *self._pages])
            return _send(start_response, _NOT_FOUND, "text/plain", f"{known}\n".encode())
        body = _json(dict(self._describe()))
        return _send(start_response, _OK if check() else _UNAVAILABLE, "application/json", body)


def _json(value: Json) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _send(start_response: StartResponse, status: str, content_type: str, body: bytes) -> Iterable[bytes]:
    start_response(status, [("Content-Type", content_type), ("Content-Length", str(len(body)))])
    return [body]


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request: one slow client does not keep others waiting, and many give way to those who come."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MAX_CLIENTS

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._clients: dict[int, socket.socket] = {}  # by descriptor, the one that came first at the beginning
        self._counting = Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._counting:
            if len(self._clients) >= MAX_CLIENTS:
                slowest = self._clients.pop(next(iter(self._clients)))
                with contextlib.suppress(OSError):  # it has gone by itself
                    slowest.shutdown(socket.SHUT_RDWR)
            self._clients[request.fileno()] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._counting:
            self._clients.pop(request.fileno(), None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # The base class looks its own host name up, which can hang for seconds without DNS.
        super(WSGIServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


class _ServerIPv6(_Server):
    """The same for an IPv6 address."""

    address_family = socket.AF_INET6


def _server_for(host: str) -> type[_Server]:
    return _ServerIPv6 if ":" in host else _Server


class _Handler(WSGIRequestHandler):
    """Silent, and with a limit on how long a client may take."""

    timeout = _CLIENT_TIMEOUT_S

    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
