"""Payloads over the wire, for clients that cannot map the pool file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np

from kvstore.block import SlotArray
from kvstore.errors import LeaseError
from kvstore.lease import Lease
from kvstore.service.clients import OpenWrite
from kvstore.service.codec import PIECE_BYTES
from kvstore.service.errors import InvalidRequestError, NotPossibleError
from kvstore.tiers.base import Payload
from kvstore.tiers.host import HostTier
from kvstore.v1 import block_pb2

_BLOCKS_AT_ONCE = 4096


async def send(
    host: HostTier, lease: Lease, slots: SlotArray, size: int
) -> AsyncIterator[block_pb2.ReadBlocksResponse]:
    """A lease's payloads, one behind the other in pieces. LeaseError as soon as the lease is over."""
    sums = np.array(host.checksums(slots), dtype="<u8").tobytes()
    for start in range(0, len(slots), _BLOCKS_AT_ONCE):
        for data in _pieces(host.views(slots[start : start + _BLOCKS_AT_ONCE], size)):
            if lease.over:
                raise LeaseError(f"lease {lease.id} ran out while its blocks were sent; renew it in time")
            yield block_pb2.ReadBlocksResponse(data=data, checksums=sums)
            sums = b""
        await asyncio.sleep(0)  # others are served meanwhile, however small the blocks are


async def receive(opened: OpenWrite, first: bytes, rest: AsyncIterator[block_pb2.WriteBlocksRequest]) -> int:
    """Fill a write's slots with what comes; the bytes of all its payloads have to."""
    if opened.streaming or opened.received:
        raise NotPossibleError(f"the payloads of write {opened.id} come already; send them once")
    opened.streaming = True
    try:
        sink = _Sink(opened)
        sink.put(first)
        async for piece in rest:
            sink.put(piece.data)
        sink.require_full()
    finally:
        opened.streaming = False
    opened.received = True
    return sink.count


class _Sink:
    """The payloads of a write as one string of bytes to fill."""

    def __init__(self, opened: OpenWrite) -> None:
        self._opened = opened
        self._payloads = opened.write.payloads
        self._size = opened.write.space.payload_bytes
        self._total = len(self._payloads) * self._size
        self.count = 0

    def put(self, data: bytes) -> None:
        write = self._opened.write
        if not write.open or write.quarantined or write.clock() > write.deadline:
            raise NotPossibleError(f"write {self._opened.id} is over, or past its deadline; begin another")
        if len(data) > PIECE_BYTES or self.count + len(data) > self._total:
            raise InvalidRequestError(
                f"a piece of {len(data)} bytes came at {self.count} of {self._total}; send pieces of at most "
                f"{PIECE_BYTES} bytes, {self._size} bytes for each block that is yours"
            )
        source = np.frombuffer(data, dtype=np.uint8)
        while len(source):
            block, at = divmod(self.count, self._size)
            part = source[: self._size - at]
            self._payloads[block][at : at + len(part)] = part
            self.count += len(part)
            source = source[len(part) :]

    def require_full(self) -> None:
        if self.count != self._total:
            raise InvalidRequestError(
                f"{self.count} bytes came, the write takes {self._total}: {self._size} for each block "
                "that is yours; send all of them"
            )


def _pieces(views: list[Payload]) -> Iterator[bytes]:
    """Copies of the payloads' bytes, in pieces that may span several."""
    waiting: list[Payload] = []
    room = PIECE_BYTES
    for view in views:
        rest = view
        while len(rest):
            part, rest = rest[:room], rest[room:]
            waiting.append(part)
            room -= len(part)
            if not room:
                yield b"".join(part.data for part in waiting)
                waiting, room = [], PIECE_BYTES
    if waiting:
        yield b"".join(part.data for part in waiting)
