"""The gRPC server: listens, serves, drains."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.address import Address
from kvstore.errors import ConfigError
from kvstore.service.admin import AdminService
from kvstore.service.blocks import BlockService
from kvstore.service.codec import MESSAGE_BYTES
from kvstore.service.doorman import Doorman
from kvstore.service.gate import Gate
from kvstore.service.listening import require_free_port
from kvstore.service.lookup import LookupService
from kvstore.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    lookup_pb2,
    lookup_pb2_grpc,
)

_SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (lookup_pb2, "LookupService"),
        (block_pb2, "BlockService"),
        (admin_pb2, "AdminService"),
    )
)
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES + (2 << 20)),  # see Gate: it answers, and counts
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a lottery
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
_SOCKET_MODE = 0o600
CALLS_MAX = 4096
"""Calls at the same time, those included that wait or watch; gRPC refuses more as RESOURCE_EXHAUSTED."""


class Server:
    """The services of one store on one or several addresses."""

    def __init__(self, gate: Gate, credentials: grpc.ServerCredentials | None) -> None:
        """``credentials`` are for TCP; a unix socket has its file's permissions."""
        self._grpc = grpc.aio.server(
            interceptors=(Doorman(gate),), options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX
        )
        self._health = health.aio.HealthServicer()
        self._credentials = credentials
        self._sockets: list[tuple[Path, os.stat_result]] = []

    def bind(self, addresses: Sequence[Address]) -> list[str]:
        """Take the addresses, with the ports that were chosen; nobody is answered yet.

        ConfigError where one cannot be had.
        """
        return [self._listen(address) for address in addresses]

    async def start(self, lookup: LookupService, blocks: BlockService, admin: AdminService) -> None:
        """Serve, and say so to health checks."""
        lookup_pb2_grpc.add_LookupServiceServicer_to_server(lookup, self._grpc)
        block_pb2_grpc.add_BlockServiceServicer_to_server(blocks, self._grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        await self.tell(serving=False)
        await self._grpc.start()
        await self.tell(serving=True)

    async def tell(self, *, serving: bool) -> None:
        """What health checks are answered from now on."""
        states = health_pb2.HealthCheckResponse
        for service in ("", *_SERVICES):
            await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, seconds: float) -> None:
        """Take no more calls, give those that run ``seconds``, and remove the sockets."""
        await self._grpc.stop(seconds)
        self.remove_sockets()

    def remove_sockets(self) -> None:
        """Unlink those that are still this server's. Idempotent."""
        for path, ours in self._sockets:
            try:
                if os.path.samestat(path.lstat(), ours):
                    path.unlink()
            except FileNotFoundError:
                continue
        self._sockets.clear()

    def _listen(self, address: Address) -> str:
        if address.path is not None:
            return self._listen_on_socket(address.path)
        require_free_port(address)
        try:
            if self._credentials is None:
                port = self._grpc.add_insecure_port(str(address))
            else:
                port = self._grpc.add_secure_port(str(address), self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: the port is in use, or the address is not this machine's; "
                "choose another in listen"
            ) from error
        return str(Address(host=address.host, port=port))

    def _listen_on_socket(self, path: Path) -> str:
        _make_way(path)
        # gRPC unlinks the name that it was given, whoever's that is by then; so it gets one of its own, and
        # the socket its place by a rename, which of two servers that start at once leaves one.
        own = path.with_name(f".{os.getpid()}.{len(self._sockets)}")
        before = os.umask(0o777 & ~_SOCKET_MODE)
        try:
            own.unlink(missing_ok=True)
            self._grpc.add_insecure_port(f"unix:{own}")
            self._sockets.append((path, own.lstat()))
            own.rename(path)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"cannot listen on unix:{path}: choose in listen a path of at most 107 bytes in a "
                "folder that this user may write"
            ) from error
        finally:
            os.umask(before)
        return f"unix:{path}"


def _make_way(path: Path) -> None:
    """Remove the socket of a server that is gone; ConfigError where one listens, or it is no socket."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(
            f"listen names unix:{path}, which is there and no socket; move it, or choose another"
        )
    is_stale = False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            is_stale = True
        except OSError as error:
            raise ConfigError(f"listen names unix:{path}: {error.strerror}; choose another path") from error
    if is_stale:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"listen names unix:{path}, left by a server that is gone, and this user may not remove it: "
                f"{error.strerror}; remove it, or choose another path"
            ) from error
        return
    raise ConfigError(f"unix:{path} is in use by another server; stop it, or choose another path in listen")
