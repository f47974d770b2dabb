"""Damaging one block in Redis behind the tier's back."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.block import BlockRows
from kvstore.tiers.redis_connection import ServerKind, WiredConnection, read_url
from kvstore.tiers.redis_value import block_key
from kvstore.tiers.redis_wire import Reply, Wire, command

_SECONDS_MAX = 5.0


def flip_last_byte(url: str, prefix: str, row: BlockRows, clock: Callable[[], float]) -> bool:
    """Invert the last payload byte of the only block in ``row``, leaving its header as it was.

    False when Redis does not have the block, or is not there.
    """
    key = block_key(prefix, row, 0)
    servers = read_url(url, clock, _SECONDS_MAX)
    # Of a cluster's servers, those that do not keep the key refuse.
    places = servers.addresses if servers.kind is ServerKind.CLUSTER else (None,)
    return any(_flip(servers.connection(place), key, clock) for place in places)


def _flip(connection: WiredConnection, key: bytes, clock: Callable[[], float]) -> bool:
    try:
        wire = connection.open(clock() + _SECONDS_MAX)
        value_bytes = _ask(wire, b"STRLEN", key)
        if not isinstance(value_bytes, int) or not value_bytes:
            return False
        at = b"%d" % (value_bytes - 1)
        last = _ask(wire, b"GETRANGE", key, at, at)
        return isinstance(last, bytes) and _ask(wire, b"SETRANGE", key, at, _inverted(last)) == value_bytes
    except OSError:
        return False
    finally:
        connection.shut()


def _ask(wire: Wire, *parts: bytes) -> Reply:
    wire.send([command(*parts)])
    return wire.read_reply()


def _inverted(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data)
