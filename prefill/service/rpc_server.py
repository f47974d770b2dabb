"""The gRPC server of a worker: listens, serves, tells its health."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.address import Address
from kvstore.errors import ConfigError
from kvstore.service.listening import require_free_port
from prefill.service.asks import MESSAGE_BYTES
from prefill.service.rpc import PrefillService
from prefill.v1 import prefill_pb2, prefill_pb2_grpc

_SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second worker on the same port is an error, not a lottery
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
_SOCKET_UMASK = 0o177
_CALLS_MAX = 4096
"""Calls at the same time, those included that wait; gRPC refuses more as RESOURCE_EXHAUSTED."""


class RpcServer:
    """One worker's calls on one or several addresses."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """``credentials`` are for TCP; a unix socket has its file's permissions."""
        self._credentials = credentials
        self._grpc = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_CALLS_MAX)
        self._health = health.aio.HealthServicer()

    def bind(self, addresses: Sequence[Address]) -> list[str]:
        """Take the addresses, with the ports that were chosen; nobody is answered yet.

        ConfigError where one cannot be had.
        """
        return [self._listen(address) for address in addresses]

    async def start(self, service: PrefillService) -> None:
        """Serve, and say so to health checks."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        await self._grpc.start()
        await self.tell(serving=True)

    async def tell(self, *, serving: bool) -> None:
        """What health checks are answered from now on."""
        states = health_pb2.HealthCheckResponse
        for name in ("", _SERVICE):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def follow(self, changed: asyncio.Event, healthy: Callable[[], bool]) -> None:
        """Tell health checks what ``healthy`` says whenever ``changed`` is set, until cancelled."""
        while True:
            await changed.wait()
            changed.clear()
            await self.tell(serving=healthy())

    async def stop(self, seconds: float) -> None:
        """Take no more calls, and give those that run ``seconds``."""
        await self._grpc.stop(seconds)

    def _listen(self, address: Address) -> str:
        if address.path is not None:
            _require_free(address.path)
        else:
            require_free_port(address)
        before = os.umask(_SOCKET_UMASK)
        try:
            if address.path is not None or self._credentials is None:
                port = self._grpc.add_insecure_port(str(address))
            else:
                port = self._grpc.add_secure_port(str(address), self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: it is in use, or not this machine's to use; "
                "choose another in listen"
            ) from error
        finally:
            os.umask(before)
        return str(address) if address.path is not None else str(Address(host=address.host, port=port))


def _require_free(path: Path) -> None:
    """ConfigError where a server listens on a socket, or the path is no socket. gRPC replaces a stale one."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"listen names unix:{path}, which is there and no socket; choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        raise ConfigError(f"listen names unix:{path}: {error.strerror}; choose another path") from error
    raise ConfigError(f"unix:{path} is in use by another server; stop it, or choose another path in listen")
