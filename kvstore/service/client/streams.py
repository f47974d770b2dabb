"""Payloads of a client that does not map the pool file: one string of bytes, in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError
from kvstore.service.client.messages import expect_count
from kvstore.service.codec import PIECE_BYTES
from kvstore.tiers.base import Payload
from kvstore.tiers.memory import payload_checksum
from kvstore.v1 import block_pb2


class Received:
    """The payloads of ``blocks`` blocks of ``size`` bytes, as they come."""

    def __init__(self, blocks: int, size: int) -> None:
        self._buffer = np.empty((blocks, size), dtype=np.uint8)
        self._bytes = self._buffer.reshape(-1)
        self.checksums: list[int] = []
        """xxh3_64 of each payload, as its writer gave it."""
        self._count = 0

    def take(self, piece: block_pb2.ReadBlocksResponse) -> None:
        """The next piece; the first one brings the checksums. KVStoreError for more than was asked."""
        if not self._count:
            self.checksums = np.frombuffer(piece.checksums, dtype="<u8").tolist()
            expect_count(len(self.checksums), len(self._buffer), "checksums")
        end = self._count + len(piece.data)
        if end > len(self._bytes):
            raise KVStoreError(
                f"the server sent {end} bytes or more, expected {len(self._bytes)}; use a client and a "
                "server of one version"
            )
        self._bytes[self._count : end] = np.frombuffer(piece.data, dtype=np.uint8)
        self._count = end

    @property
    def whole_blocks(self) -> int:
        return self._count // self._buffer.shape[1]

    def intact_blocks(self) -> int:
        """Leading blocks that came whole and have their checksum."""
        for block in range(self.whole_blocks):
            if payload_checksum(self._buffer[block]) != self.checksums[block]:
                return block
        return self.whole_blocks

    def payloads(self, blocks: int) -> list[Payload]:
        return list(self._buffer[:blocks])


def pieces(
    buffer: NDArray[np.uint8], head: block_pb2.WriteBlocksRequest
) -> Iterator[block_pb2.WriteBlocksRequest]:
    """A contiguous buffer in pieces; ``head`` names the write and gets the first one."""
    memory = buffer.reshape(-1).data
    head.data = bytes(memory[:PIECE_BYTES])
    yield head
    for at in range(PIECE_BYTES, len(memory), PIECE_BYTES):
        yield block_pb2.WriteBlocksRequest(data=bytes(memory[at : at + PIECE_BYTES]))
