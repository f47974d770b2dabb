"""The redis tier: blocks that outlive an engine and are shared by a fleet, in Redis or Valkey.

One key a block, one atomic value. Whatever the server does, a call ends by its deadline and answers
with outcomes; what it delivers has been compared and checksummed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial

from kvstore.block import BlockRows, MissCause, TierName
from kvstore.errors import ConfigError
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierMatch, TierStatus
from kvstore.tiers.redis_cluster import EXPECTED_ERRORS, Cluster
from kvstore.tiers.redis_commands import (
    Arrival,
    Outcome,
    Values,
    fetch,
    forget,
    judge,
    refresh,
    store,
)
from kvstore.tiers.redis_connection import Address, ServerKind, read_url
from kvstore.tiers.redis_exchange import Exchanges, LookUp
from kvstore.tiers.redis_keys import RowKeys
from kvstore.tiers.redis_match import WarmSegments, growing_match
from kvstore.tiers.redis_node import Lane, Node
from kvstore.tiers.redis_topology import OneServer, Topology
from kvstore.tiers.redis_value import MAX_HEADER_BYTES, header_bytes
from kvstore.tiers.redis_wire import Clock, ErrorReply, Wire


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to reach Redis, and how to keep blocks there.

    ``connections`` to each server carry payloads; look-ups have ``probe_connections`` to themselves. A
    key that is not read for ``ttl_seconds`` expires.
    """

    url: str
    prefix: str = "kv"
    ttl_seconds: float = 86_400.0
    connections: int = 2
    probe_connections: int = 1
    connect_timeout_seconds: float = 2.0
    max_payload_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, least in (
            ("ttl_seconds", 1),
            ("connections", 1),
            ("probe_connections", 1),
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
    """Blocks in Redis or Valkey. Thread-safe; every call may block until its deadline.

    Constructing it connects to nothing: servers may come, go and come back.
    """

    def __init__(self, options: RedisOptions, clock: Clock) -> None:
        self._prefix = options.prefix
        self._ttl_ms = round(options.ttl_seconds * 1000)
        self._max_payload_bytes = options.max_payload_bytes
        self._topology = _topology_of(options, clock)
        self._exchanges = Exchanges(self._topology)
        self._warm = WarmSegments()

    @property
    def name(self) -> TierName:
        return TierName.REDIS

    def errors(self) -> Counter[str]:
        """What went wrong since the start, by kind: see ``Node.errors``."""
        return self._topology.errors()

    def breakers(self) -> dict[str, bool]:
        """Whether a node is given up for now, by its place."""
        return self._topology.breakers()

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        """The leading run whose keys exist; at the deadline, as much of it as is known."""
        keys = RowKeys(self._prefix, rows, segments_at_once=self._topology.segments_at_once)
        run = TierMatch(0, None)
        with LookUp(self._topology, keys, deadline) as look_up:
            warm = self._warm.run_of(rows)
            for run in growing_match(look_up.counts, keys, warm):  # noqa: B007  the last one counts
                pass
        self._warm.note(rows, run)
        return run

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        """See ``Tier.load``. Deletes what no reader can ever read, and renews the rest's time to live."""
        assert len(destinations) == len(rows), "one destination a block"
        keys = RowKeys(self._prefix, rows)

        def exchange(wire: Wire, blocks: Sequence[int], got: list[Outcome]) -> None:
            targets = [destinations[block] for block in blocks]
            arrivals: list[Arrival] = []
            try:
                arrivals.extend(fetch(wire, keys, blocks, targets))
            finally:
                got.extend(judge(rows, blocks, targets, arrivals))
            refresh(wire, keys, blocks, list(zip(got, arrivals, strict=True)), self._ttl_ms)

        return _load_result(self._exchanges.ask(Lane.BULK, _blocks_of(rows), deadline, exchange))

    def save(
        self,
        rows: BlockRows,
        payloads: Sequence[Payload],
        checksums: Sequence[int],
        deadline: float,
    ) -> list[SaveOutcome]:
        """See ``Tier.save``. After a block that a server does not take, no more are offered."""
        if not self._takes(rows, payloads):
            return [SaveOutcome.REFUSED] * len(rows)
        keys, values = RowKeys(self._prefix, rows), Values(rows, payloads, checksums)

        def exchange(
            wire: Wire, blocks: Sequence[int], got: list[SaveOutcome | ErrorReply | MissCause]
        ) -> None:
            got.extend(store(wire, keys, blocks, values, self._ttl_ms))
            if len(got) < len(blocks):
                refusal = next(each for each in got if isinstance(each, ErrorReply) and each.code != "ASK")
                got.extend([refusal] * (len(blocks) - len(got)))

        return list(map(_save_outcome, self._exchanges.ask(Lane.BULK, _blocks_of(rows), deadline, exchange)))

    def discard(self, rows: BlockRows, deadline: float) -> int:
        """Delete the blocks' keys; how many were there, none where the server did not say."""
        keys = RowKeys(self._prefix, rows)

        def exchange(wire: Wire, blocks: Sequence[int], got: list[int | ErrorReply | MissCause]) -> None:
            got.extend(forget(wire, keys, blocks))

        answers = self._exchanges.ask(Lane.BULK, _blocks_of(rows), deadline, exchange)
        return sum(answer for answer in answers if isinstance(answer, int))

    @property
    def reached(self) -> bool:
        """Whether every server has answered, and none is given up."""
        return self._topology.reached

    def reach(self, deadline: float) -> None:
        """Find out by ``deadline`` whether those answer that are not ``reached``; ``status`` then says so."""
        self._topology.reach(deadline)

    def status(self) -> TierStatus:
        return self._topology.status()

    def close(self) -> None:
        self._topology.close()

    def _takes(self, rows: BlockRows, payloads: Iterable[Payload]) -> bool:
        assert rows.tokens is not None, "a save needs the tokens, to store them beside the payload"
        fits = all(len(payload) <= self._max_payload_bytes for payload in payloads)
        return fits and header_bytes(rows.tokens.shape[1]) <= MAX_HEADER_BYTES


def _topology_of(options: RedisOptions, clock: Clock) -> Topology:
    servers = read_url(options.url, clock, options.connect_timeout_seconds)

    def open_node(address: Address | None, expected_errors: Set[str] = frozenset()) -> Node:
        return Node(
            partial(servers.connection, address),
            connections={Lane.PROBE: options.probe_connections, Lane.BULK: options.connections},
            connect_timeout_seconds=options.connect_timeout_seconds,
            clock=clock,
            expected_errors=expected_errors,
        )

    if servers.kind is ServerKind.CLUSTER:
        return Cluster(servers.addresses, partial(open_node, expected_errors=EXPECTED_ERRORS), clock)
    return OneServer(open_node(None))


def _blocks_of(rows: BlockRows) -> tuple[bytes, range]:
    return rows.tags, range(len(rows))


def _load_result(outcomes: Sequence[Outcome]) -> LoadResult:
    causes = [
        MissCause.UNAVAILABLE
        if isinstance(outcome, ErrorReply)
        else outcome
        if isinstance(outcome, MissCause)
        else None
        for outcome in outcomes
    ]
    return LoadResult(causes, [outcome if isinstance(outcome, int) else 0 for outcome in outcomes])


def _save_outcome(answer: SaveOutcome | ErrorReply | MissCause) -> SaveOutcome:
    if isinstance(answer, SaveOutcome):
        return answer
    if isinstance(answer, ErrorReply):
        return SaveOutcome.FULL if answer.code == "OOM" else SaveOutcome.UNAVAILABLE
    return SaveOutcome.TIMEOUT if answer is MissCause.TIMEOUT else SaveOutcome.UNAVAILABLE
