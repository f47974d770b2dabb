"""Whether a port can be listened on, of names that stand for several addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing

import pytest

from kvstore.address import Address
from kvstore.errors import ConfigError
from kvstore.service.listening import require_free_port

ELSEWHERE = "192.0.2.1"  # for documentation: no machine has it


@pytest.fixture
def stands_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Address]:
    """An address whose name stands for these hosts, as some resolver says."""

    def name(*hosts: str, port: int) -> Address:
        def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        return Address(host="name", port=port)

    return name


def test_one_of_several_addresses_is_enough(stands_for: Callable[..., Address]) -> None:
    require_free_port(stands_for(ELSEWHERE, "127.0.0.1", port=0))
    with pytest.raises(ConfigError, match="cannot listen on name:0: Cannot assign requested address"):
        require_free_port(stands_for(ELSEWHERE, port=0))


def test_a_port_that_is_taken_on_one_of_them_is_taken(stands_for: Callable[..., Address]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on name:{port}: Address already in use"):
            require_free_port(stands_for(ELSEWHERE, "127.0.0.1", port=port))
