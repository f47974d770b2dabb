"""The HTTP server of a worker: one port, served on the loop that everything else is on."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvstore.address import Address
from kvstore.errors import ConfigError

_BACKLOG = 1024
_CONNECTIONS_MAX = 4096
_SEND_BUFFER_BYTES = 16 * 2**10
"""What the kernel keeps for a slow reader: tokens are small, and more would only hide that it lags."""


@dataclass(frozen=True, slots=True)
class WebTLS:
    """PEM files that ``server_credentials`` has found to be good."""

    cert: Path
    key: Path
    client_ca: Path | None

    def settings(self) -> dict[str, Any]:
        """As uvicorn knows them."""
        files = {"ssl_certfile": str(self.cert), "ssl_keyfile": str(self.key)}
        if self.client_ca is None:
            return files
        return {**files, "ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}


class WebServer:
    """Answers HTTP from ``start`` to ``stop``."""

    def __init__(self, address: Address, stall_seconds: float, tls: WebTLS | None = None) -> None:
        """Take the port; nobody is answered yet. ConfigError where it cannot be had."""
        self._tls = tls
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            # Connections inherit it: the kernel ends one whose client takes nothing for so long.
            milliseconds = int(stall_seconds * 1000)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            self._socket.bind((address.host, address.port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"http {address} cannot be listened on: {error.strerror or error}; stop what uses it, "
                "name another address, or none"
            ) from error
        port = int(self._socket.getsockname()[1])
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{Address(host=address.host, port=port)}"
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        """Answer from now on. Raises what keeps it from that."""
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_graceful_shutdown=1,
            **({} if self._tls is None else self._tls.settings()),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="prefill-http")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Hang up on everybody; a second is what they have."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
        self.close()

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to the worker, which drains first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
