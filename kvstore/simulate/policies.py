"""Policies by the names that a server knows them by, and the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvstore.evict.arc import ARC
from kvstore.evict.lfu import LFU
from kvstore.evict.lru import LRU
from kvstore.evict.oracle import Oracle, next_uses
from kvstore.evict.reuse import Reuse
from kvstore.evict.s3fifo import S3FIFO
from kvstore.simulate.instance import MakeEvictor
from kvstore.simulate.workload import Workload

ORACLE = "oracle"
POLICIES: dict[str, Callable[[Workload], MakeEvictor]] = {
    "lru": lambda _: LRU,
    "lfu": lambda _: LFU,
    "s3fifo": lambda _: S3FIFO,
    "arc": lambda _: ARC,
    "reuse": lambda _: Reuse,
    ORACLE: lambda workload: partial(Oracle, future=next_uses(workload.blocks)),
}
"""The oracle has read the workload, and has to be asked for all of it; all others see it as it comes."""
