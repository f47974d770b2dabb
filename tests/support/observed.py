"""What a sidecar's answers say, in a form to compare."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.v1 import lookup_pb2
from tests.support.stubs import Peer, Raw, Tokens


class Counted:
    """What the server counts from here on, in tokens."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._before = raw.status()

    @property
    def tokens(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """(Asked, hit by tier, missed by cause), without what is zero."""
        now = self._raw.status()
        return (
            now.asked_tokens - self._before.asked_tokens,
            _difference(now.hit_tokens, self._before.hit_tokens),
            _difference(now.miss_tokens, self._before.miss_tokens),
        )


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    found = {name: value - before.get(name, 0) for name, value in now.items()}
    assert all(value >= 0 for value in found.values()), "counters never go back"
    return {name: value for name, value in found.items() if value}


def tier_tokens(answer: lookup_pb2.LookupResponse) -> dict[int, tuple[int, int | None]]:
    """(Served, leading) tokens by tier."""
    return {
        each.tier: (each.served_tokens, each.leading_tokens if each.HasField("leading_tokens") else None)
        for each in answer.tiers
    }


def report(peer: Peer, tokens: Tokens) -> list[tuple[list[int], str, bool]]:
    """(Tiers, cause, being written) of each block."""
    return [(list(each.tiers), each.cause, each.being_written) for each in peer.explain(tokens).blocks]
