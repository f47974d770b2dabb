"""The redis tier: blocks that outlive an engine and are shared by a fleet, in Redis or Valkey.

One key a block, one atomic value. Whatever the server does, a call ends by its deadline and answers
with outcomes; what it delivers has been compared and checksummed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.block import BlockRows, MissCause, TierName
from kvstore.errors import ConfigError
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierStatus
from kvstore.tiers.redis_commands import (
    Fetched,
    RowKeys,
    Values,
    fetch,
    forget,
    growing_match,
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
        if not self.prefix or any(character in "{} \r\n" for character in self.prefix):
            raise ConfigError(
                f"redis prefix is {self.prefix!r}, expected characters other than braces and white space; "
                "leave them out: Redis Cluster takes what is between braces as its hash tag"
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

    @property
    def breaker_open(self) -> bool:
        """Whether the server is given up for now."""
        return self._node.breaker_open

    def errors(self) -> Counter[str]:
        """What went wrong since the start, by kind (docs/metrics.md)."""
        return self._node.errors()

    def match(self, rows: BlockRows, deadline: float) -> int:
        """Length of the leading run whose keys exist; at the deadline, of as much as is known."""
        found = 0
        with suppress(OSError), self._node.borrow(Lane.PROBE, deadline) as wire:
            for found in growing_match(wire, RowKeys(self._prefix, rows)):  # noqa: B007
                pass
        return found

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        """See ``Tier.load``. Deletes what no reader can ever read, and renews the rest's time to live."""
        keys = RowKeys(self._prefix, rows)
        fetched: list[Fetched] = []
        rest = MissCause.UNAVAILABLE
        try:
            with self._node.borrow(Lane.BULK, deadline) as wire:
                fetched.extend(fetch(wire, keys, rows, destinations))
                refresh(wire, keys, fetched, self._ttl_ms)
        except TimeoutError:
            rest = MissCause.TIMEOUT
        except OSError:
            pass
        return _load_result(fetched, rest, len(rows))

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


def _load_result(fetched: Sequence[Fetched], rest: MissCause, blocks: int) -> LoadResult:
    """Outcomes of all blocks; ``rest`` is that of those that were not reached."""
    result = LoadResult([rest] * blocks, [0] * blocks)
    for block, (outcome, _) in enumerate(fetched):
        if isinstance(outcome, MissCause):
            result.causes[block] = outcome
        else:
            result.causes[block], result.checksums[block] = None, outcome
    return result
