"""The redis tier: blocks that outlive an engine and are shared by a fleet, in Redis or Valkey.

One key a block, one atomic value. Whatever the server does, a call ends by its deadline and answers
with outcomes; what it delivers has been compared and checksummed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.block import BlockRows, MissCause, TierName
from kvstore.errors import ConfigError
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierMatch, TierStatus
from kvstore.tiers.redis_commands import (
    Arrival,
    Outcome,
    RowKeys,
    Values,
    fetch,
    forget,
    growing_match,
    judge,
    refresh,
    store,
)
from kvstore.tiers.redis_connection import connections_to
from kvstore.tiers.redis_node import Lane, Node
from kvstore.tiers.redis_value import MAX_HEADER_BYTES, header_bytes
from kvstore.tiers.redis_wire import Clock


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to reach Redis, and how to keep blocks there.

    ``connections`` carry payloads; look-ups have one more to themselves. A key that is not read
    for ``ttl_seconds`` expires.
    """

    url: str
    prefix: str = "kv"
    ttl_seconds: float = 86_400.0
    connections: int = 2
    connect_timeout_seconds: float = 2.0
    max_payload_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, least in (
            ("ttl_seconds", 1),
            ("connections", 1),
            ("connect_timeout_seconds", 0.001),
            ("max_payload_bytes", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least {least}; raise it")
        if re.fullmatch(r"[^{}\s]+", self.prefix) is None:
            raise ConfigError(
                f"redis prefix is {self.prefix!r}, expected one or more characters without white space, and "
                "without braces, between which Redis Cluster looks for its hash tag; leave them out"
            )


class RedisTier:
    """Blocks in one Redis or Valkey server. Thread-safe; every call may block until its deadline.

    Constructing it connects to nothing: the server may come, go and come back.
    """

    def __init__(self, options: RedisOptions, clock: Clock) -> None:
        self._prefix = options.prefix
        self._ttl_ms = round(options.ttl_seconds * 1000)
        self._max_payload_bytes = options.max_payload_bytes
        self._node = Node(
            connections_to(options.url, clock, options.connect_timeout_seconds),
            bulk_connections=options.connections,
            connect_timeout_seconds=options.connect_timeout_seconds,
            clock=clock,
        )

    @property
    def name(self) -> TierName:
        return TierName.REDIS

    def errors(self) -> Counter[str]:
        """What went wrong since the start, by kind: see ``Node.errors``."""
        return self._node.errors()

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        """The leading run whose keys exist; at the deadline, as much of it as is known."""
        runs = [TierMatch(0, None)]
        if not len(rows):
            return runs[-1]
        try:
            with self._node.borrow(Lane.PROBE, deadline) as wire:
                # What came before an error is kept: extend() takes each as it comes.
                runs.extend(growing_match(wire, RowKeys(self._prefix, rows)))
        except TimeoutError:
            return TierMatch(runs[-1].blocks, MissCause.TIMEOUT)
        except OSError:
            return TierMatch(runs[-1].blocks, MissCause.UNAVAILABLE)
        return runs[-1]

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        """See ``Tier.load``. Deletes what no reader can ever read, and renews the rest's time to live."""
        assert len(destinations) == len(rows), "one destination a block"
        keys = RowKeys(self._prefix, rows)
        arrivals: list[Arrival] = []
        outcomes: list[Outcome] = []
        rest = MissCause.UNAVAILABLE
        try:
            with self._node.borrow(Lane.BULK, deadline) as wire:
                arrivals.extend(fetch(wire, keys, destinations))
                outcomes = judge(rows, destinations, arrivals)
                refresh(wire, keys, outcomes, arrivals, self._ttl_ms)
        except TimeoutError:
            rest = MissCause.TIMEOUT
        except OSError:
            pass
        if len(outcomes) < len(arrivals):
            outcomes = judge(rows, destinations, arrivals)
        return _load_result([*outcomes, *[rest] * (len(rows) - len(outcomes))])

    def save(
        self,
        rows: BlockRows,
        payloads: Sequence[Payload],
        checksums: Sequence[int],
        deadline: float,
    ) -> list[SaveOutcome]:
        """See ``Tier.save``. After a block that the server does not take, no more are offered."""
        if not self._takes(rows, payloads):
            return [SaveOutcome.REFUSED] * len(rows)
        keys = RowKeys(self._prefix, rows)
        outcomes: list[SaveOutcome] = []
        rest = SaveOutcome.UNAVAILABLE
        try:
            with self._node.borrow(Lane.BULK, deadline) as wire:
                outcomes.extend(store(wire, keys, Values(rows, payloads, checksums), self._ttl_ms))
                rest = next((outcome for outcome in outcomes if outcome is not SaveOutcome.STORED), rest)
        except TimeoutError:
            rest = SaveOutcome.TIMEOUT
        except OSError:
            pass
        return outcomes + [rest] * (len(rows) - len(outcomes))

    def discard(self, rows: BlockRows, deadline: float) -> int:
        """Delete the blocks' keys; how many were there, none where the server did not say."""
        with suppress(OSError), self._node.borrow(Lane.BULK, deadline) as wire:
            return forget(wire, RowKeys(self._prefix, rows))
        return 0

    def status(self) -> TierStatus:
        return self._node.status()

    def close(self) -> None:
        self._node.close()

    def _takes(self, rows: BlockRows, payloads: Iterable[Payload]) -> bool:
        assert rows.tokens is not None, "a save needs the tokens, to store them beside the payload"
        fits = all(len(payload) <= self._max_payload_bytes for payload in payloads)
        return fits and header_bytes(rows.tokens.shape[1]) <= MAX_HEADER_BYTES


def _load_result(outcomes: Sequence[Outcome]) -> LoadResult:
    return LoadResult(
        causes=[outcome if isinstance(outcome, MissCause) else None for outcome in outcomes],
        checksums=[0 if isinstance(outcome, MissCause) else outcome for outcome in outcomes],
    )
