"""A small HTTP server on threads of its own, so that a loop that is stuck can be seen to be."""

from __future__ import annotations

import asyncio
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvstore.address import Address
from kvstore.errors import ConfigError
from kvstore.web.pages import Pages, Questions

_POLL_SECONDS = 0.2
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\ntoo many connections\n"
_SAFE = {
    # The page loads what it needs from here, and nothing from anywhere else, whatever text it shows.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # After an upgrade a page of the new version is shown, with counts of now.
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WebLimits:
    """What a client may cost: a thread each, and not for long.

    A connection carries one request and is closed ``request_seconds`` after it was opened, however
    busy it is. The owner's loop has ``owner_seconds`` to answer.
    """

    connections: int = 32
    request_seconds: float = 5.0
    owner_seconds: float = 1.0


class WebServer:
    """The pages of one store. Thread-safe."""

    def __init__(
        self,
        address: Address,
        questions: Questions,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float],
        limits: WebLimits = WebLimits(),
    ) -> None:
        """``loop`` is the store's owner: whatever is asked of the store is asked there."""
        self._address = address
        self._pages = Pages(questions, loop, owner_seconds=limits.owner_seconds)
        self._clock = clock
        self._limits = limits
        self._server: _Server | None = None
        self._thread = threading.Thread(target=self._serve, name="kvstore-web", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on, since it was started."""
        assert self._server is not None, "started"
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Listen and answer from now on; once. ConfigError where the address cannot be had."""
        try:
            self._server = _Server(self._address, self._pages, self._clock, self._limits)
        except OSError as error:
            raise ConfigError(
                f"http_listen {self._address} cannot be listened on: {error.strerror or error}; stop what "
                "uses it, name another address, or none"
            ) from error
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close what is open; nobody is waited for. Idempotent."""
        if self._server is not None and self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server.close_connections()

    def _serve(self) -> None:
        assert self._server is not None, "started"
        self._server.serve_forever(_POLL_SECONDS)


class _Server(ThreadingHTTPServer):
    """One thread a connection, a bounded number of them, each for a bounded time."""

    request_queue_size = 32

    def __init__(self, address: Address, pages: Pages, clock: Callable[[], float], limits: WebLimits) -> None:
        self.pages = pages
        self._clock = clock
        self._limits = limits
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """As the base class, but without asking a name server for the host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket), "TCP"
        with self._lock:
            is_busy = len(self._deadlines) >= self._limits.connections
            if not is_busy:
                self._deadlines[request] = self._clock() + self._limits.request_seconds
        if is_busy:
            request.sendall(_BUSY)  # the first bytes of a connection: there is room for them
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket), "TCP"
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by ``serve_forever`` all the time: end what takes too long."""
        now = self._clock()
        with self._lock:
            for request, deadline in self._deadlines.items():
                if deadline <= now:
                    _hang_up(request)

    def close_connections(self) -> None:
        """Hang up on everybody. Their threads see it and end."""
        with self._lock:
            for request in self._deadlines:
                _hang_up(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients come and go as they like: nothing to tell an operator."""
        _log.debug("the connection from %s ended early", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection is closed behind it."""

    server: _Server
    server_version = "prefix-kvstore"
    sys_version = ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        page = self.server.pages.page(self.path.partition("?")[0], self.headers.get("Accept", ""))
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        for name, value in _SAFE.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def do_POST(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "nothing can be changed here; use GET")

    do_HEAD = do_GET  # noqa: N815 - these names are http.server's
    do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        # What was asked is the client's choice, control characters included.
        _log.debug("%s %r", self.address_string(), format % args)


def _hang_up(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        _log.debug("a connection was closed already")
