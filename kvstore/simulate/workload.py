"""A trace made ready for replay: its blocks are numbers, and what is counted is in arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.index import split_hashes
from kvstore.trace import Request

NO_PARENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests, with their blocks named by numbers, so that a replay needs no hash.

    ``blocks`` has one array a request: equal numbers are equal prefixes. ``parents`` is, for each number,
    that of the block before it, -1 for a first one. ``tokens`` and ``block_tokens`` are by request.
    """

    requests: Sequence[Request]
    blocks: Sequence[NDArray[np.int64]]
    parents: NDArray[np.int32]
    tokens: NDArray[np.int64]
    block_tokens: NDArray[np.int64]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Workload:
        """Name the blocks of requests, once for all replays of them."""
        numbers: dict[bytes, int] = {}
        blocks = [
            np.array(
                [numbers.setdefault(key, len(numbers)) for key in split_hashes(request.chain.hashes)],
                dtype=np.int64,
            )
            for request in requests
        ]
        parents = np.full(len(numbers), NO_PARENT, dtype=np.int32)
        for ids in blocks:
            parents[ids[1:]] = ids[:-1]
        tokens = np.array([request.tokens for request in requests], dtype=np.int64)
        block_tokens = np.array([request.block_tokens for request in requests], dtype=np.int64)
        return cls(requests, blocks, parents, tokens, block_tokens)

    @property
    def distinct_blocks(self) -> int:
        """Blocks that differ: a cache of so many never evicts."""
        return len(self.parents)


Watch = Callable[[Workload], Iterable[int]]
"""Yields the number of every request, in order; where a progress bar looks on."""


def each_request(workload: Workload) -> Iterable[int]:
    """The numbers of the requests, in order, and nobody looks on."""
    return range(len(workload.requests))
