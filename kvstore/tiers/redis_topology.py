"""Which server has which blocks, and where to ask again when one of them sends us on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstore.block import HASH_BYTES
from kvstore.tiers.base import TierStatus
from kvstore.tiers.redis_node import Node
from kvstore.tiers.redis_wire import ErrorReply


class Route(NamedTuple):
    """Whom to ask; ``asking`` for keys of a hash slot that this node is only taking over."""

    node: Node
    asking: bool = False


Share = tuple[Node, Sequence[int]]
"""A node, and the places, in a list of questions, of those that are for it."""


class Topology(Protocol):
    """The servers of one URL. Thread-safe."""

    @property
    def segments_at_once(self) -> int:
        """How many segments one command may name."""

    def shares(self, tags: bytes, deadline: float) -> list[Share]:
        """Who has the blocks of these segments, ``HASH_BYTES`` each; the node of the first one first.

        Raises TimeoutError or another OSError while that is not known.
        """

    def follow(self, error: ErrorReply, node: Node) -> Route | None:
        """Where to ask once more what ``node`` answered with ``error``; None where that is in vain."""

    def lost(self, node: Node) -> None:
        """An exchange with the node failed: another may be in its place by now."""

    def errors(self) -> Counter[str]:
        """What went wrong since the start, by kind: see ``Node.errors``."""

    def breakers(self) -> dict[str, bool]:
        """Whether a node is given up for now, by its place."""

    @property
    def reached(self) -> bool:
        """Whether every server has answered, and none is given up."""

    def reach(self, deadline: float) -> None:
        """Find out by ``deadline`` whether those answer that are not reached; ``status`` then says so."""

    def status(self) -> TierStatus: ...

    def close(self) -> None:
        """Refuse everybody from now on. Idempotent."""


class OneServer:
    """A single server, also one that Sentinel or a name in DNS points to: who that is may change."""

    # A command of so many keys takes a server some 50 us, for which others have to wait.
    segments_at_once = 4

    def __init__(self, node: Node) -> None:
        self._node = node

    def shares(self, tags: bytes, deadline: float) -> list[Share]:
        return [(self._node, range(len(tags) // HASH_BYTES))]

    def follow(self, error: ErrorReply, node: Node) -> Route | None:
        # A replica: whoever is found by connecting anew may be the primary.
        moved = error.code in {"READONLY", "MASTERDOWN"} and node.renew()
        return Route(node) if moved else None

    def lost(self, node: Node) -> None:
        """The next connection is made to whoever is there then."""

    def errors(self) -> Counter[str]:
        return self._node.errors()

    def breakers(self) -> dict[str, bool]:
        return {self._node.place: self._node.given_up}

    @property
    def reached(self) -> bool:
        return self._node.reached

    def reach(self, deadline: float) -> None:
        self._node.reach(deadline)

    def status(self) -> TierStatus:
        return self._node.status()

    def close(self) -> None:
        self._node.close()
