"""Redis or Valkey Cluster: which node has which hash slot, kept up to date beside those who ask."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from kvstore.block import HASH_BYTES
from kvstore.tiers.base import TierStatus
from kvstore.tiers.redis_commands import slot_ranges
from kvstore.tiers.redis_connection import Address, SlotRange, read_slots, slot_of
from kvstore.tiers.redis_keys import tag_runs
from kvstore.tiers.redis_node import Lane, Node
from kvstore.tiers.redis_topology import Route, Share
from kvstore.tiers.redis_wire import Clock, ErrorReply

EXPECTED_ERRORS = frozenset({"ASK", "MOVED", "TRYAGAIN"})
"""Replies with which a healthy cluster says that a slot moves: counted, but no news."""

_SLOTS = 16_384
_REFRESH_SECONDS = 0.5
"""Time between two questions for the slots, and the longest wait for one answer."""
_MOST_RETIRED = 64


class Cluster:
    """The primaries of a cluster, each with the slots that it is known to serve.

    The slots are asked for on a thread of its own, one at a time: when they are not known yet, when a
    node says that one is elsewhere, and when a node does not answer. Meanwhile what is known is used.
    """

    # Each has a slot of its own.
    segments_at_once = 1

    def __init__(self, seeds: Sequence[Address], open_node: Callable[[Address], Node], clock: Clock) -> None:
        self._seeds = seeds
        self._open_node = open_node
        self._clock = clock
        self._nodes = {seed: open_node(seed) for seed in seeds}
        self._addresses = list(seeds)
        self._slots: list[Node] = []
        self._retired: deque[Node] = deque()
        self._retired_errors: Counter[str] = Counter()
        self._suspect: Node | None = None
        self._refreshing = False
        self._refresh_at = float("-inf")
        self._trouble = ""
        self._closed = False
        # Guards what is above; notified when a refresh has ended.
        self._changed = threading.Condition()

    def shares(self, tags: bytes, deadline: float) -> list[Share]:
        slots = self._slots or self._first_slots(deadline)
        shares: dict[Node, list[int]] = {}
        for start, stop in tag_runs(tags):
            node = slots[slot_of(tags[start * HASH_BYTES : (start + 1) * HASH_BYTES])]
            shares.setdefault(node, []).extend(range(start, stop))
        return list(shares.items())

    def follow(self, error: ErrorReply, node: Node) -> Route | None:
        if error.code not in {"MOVED", "ASK"}:
            if error.code in {"CLUSTERDOWN", "READONLY", "MASTERDOWN"}:
                self.lost(node)
            return None
        try:
            _, slot, place = error.message.split()
            host, _, port = place.rpartition(":")
            number, named = int(slot), Address(host, int(port))
        except ValueError:
            return None
        with self._changed:
            if self._closed:
                return None
            target = self._node_at(named if host else named._replace(host=self._host_of(node)))
            if error.code == "MOVED" and 0 <= number < len(self._slots):
                self._slots[number] = target
        if error.code == "ASK":
            return Route(target, asking=True)
        self._refresh()
        return Route(target)

    def lost(self, node: Node) -> None:
        with self._changed:
            self._suspect = node
        self._refresh()

    def errors(self) -> Counter[str]:
        with self._changed:
            nodes = (*self._nodes.values(), *self._retired)
            return sum((node.errors() for node in nodes), self._retired_errors)

    def breakers(self) -> dict[str, bool]:
        with self._changed:
            return {node.place: node.given_up for node in self._nodes.values()}

    @property
    def reached(self) -> bool:
        with self._changed:
            nodes = list(self._nodes.values())
            return bool(self._slots) and all(node.reached for node in nodes)

    def reach(self, deadline: float) -> None:
        if not self._slots:
            with suppress(OSError):
                self._first_slots(deadline)
        with self._changed:
            nodes = list(self._nodes.values()) if self._slots else []
        for node in nodes:
            node.reach(deadline)

    def status(self) -> TierStatus:
        """Healthy while its slots are known, or were not needed yet, and every node answers."""
        with self._changed:
            nodes = list(self._nodes.values())
            if self._closed:
                return TierStatus(healthy=False, reason="redis cluster: closed")
            if not self._slots and self._trouble:
                reason = f"redis cluster: nobody told which node has which slots ({self._trouble})"
                return TierStatus(healthy=False, reason=reason)
        states = [node.status() for node in nodes]
        healthy = all(state.healthy for state in states)
        reasons = [state.reason for state in states if state.reason and state.healthy is healthy]
        return TierStatus(healthy=healthy, reason="; ".join(reasons))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for node in self._nodes.values():
                node.close()
            self._changed.notify_all()

    def _first_slots(self, deadline: float) -> list[Node]:
        self._refresh()
        with self._changed:
            while not self._slots:
                if self._closed or not self._refreshing:
                    raise ConnectionError(f"nobody told which node has which slots: {self._trouble}")
                left = deadline - self._clock()
                if left <= 0:
                    raise TimeoutError("nobody told in time which node has which slots")
                self._changed.wait(left)
            return self._slots

    def _refresh(self) -> None:
        """Have the slots asked for, unless that is under way or was done a moment ago."""
        with self._changed:
            if self._closed or self._refreshing or self._clock() < self._refresh_at:
                return
            self._refreshing = True
        try:
            # Unlike Thread.start it does not wait until the thread runs, for which there is no deadline.
            start_new_thread(self._learn, ())
        except RuntimeError as error:
            with self._changed:
                self._refreshing = False
                self._trouble = f"no thread to ask on: {error}"

    def _learn(self) -> None:
        try:
            for node, host in self._informants():
                ranges = self._ask(node, host)
                if ranges:
                    self._install(ranges)
                    break
        finally:
            with self._changed:
                self._refreshing = False
                self._refresh_at = self._clock() + _REFRESH_SECONDS
                self._changed.notify_all()

    def _informants(self) -> Iterator[tuple[Node, str]]:
        """Nodes to ask, and the hosts that they were found at; the one that is suspected comes last."""
        with self._changed:
            addresses = sorted(
                dict.fromkeys((*self._nodes, *self._addresses)),
                key=lambda address: self._suspect is not None and self._nodes.get(address) is self._suspect,
            )
        for address in addresses:
            with self._changed:
                if self._closed:
                    return
                node = self._node_at(address)
            yield node, address.host

    def _ask(self, node: Node, host: str) -> list[SlotRange]:
        try:
            with node.borrow(Lane.PROBE, self._clock() + _REFRESH_SECONDS) as wire:
                reply = slot_ranges(wire)
        except OSError as error:
            self._trouble = f"{node.place}: {error}"
            return []
        if isinstance(reply, ErrorReply):
            self._trouble = f"{node.place}: {reply.message}"
            return []
        self._trouble = f"{node.place}: no slots are assigned"
        return read_slots(reply, host)

    def _install(self, ranges: Sequence[SlotRange]) -> None:
        with self._changed:
            if self._closed:
                return
            # A slot that nobody has is asked for all the same: the answer then says what is wrong.
            slots = [self._node_at(ranges[0].primary)] * _SLOTS
            for first, last, primary, _ in ranges:
                slots[first : last + 1] = [self._node_at(primary)] * (last + 1 - first)
            self._slots = slots
            replicas = [replica for each in ranges for replica in each.replicas]
            self._addresses = list(dict.fromkeys((*replicas, *self._seeds)))
            self._suspect = None
            self._retire(set(slots))

    def _retire(self, serving: set[Node]) -> None:
        """Let go of nodes that serve no slots; what went wrong with them stays counted."""
        for address, node in [*self._nodes.items()]:
            if node not in serving:
                node.close()
                self._retired.append(self._nodes.pop(address))
        while len(self._retired) > _MOST_RETIRED:
            self._retired_errors += self._retired.popleft().errors()

    def _node_at(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._open_node(address)
        return node

    def _host_of(self, node: Node) -> str:
        return next((address.host for address, each in self._nodes.items() if each is node), "")
