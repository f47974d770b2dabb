"""Why tokens were not hit, and what to do about it, in words."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.block import MissCause


class Words(NamedTuple):
    """What a cause means, and what whoever runs the server or asks it can do."""

    why: str
    remedy: str


CAUSES = {
    MissCause.COLD: Words(
        "nobody stored these tokens after this prefix in this namespace",
        "the next request that computes it stores it; if one did, compare its model, salt and tokens",
    ),
    MissCause.EVICTED: Words(
        "it was here, and its memory was needed for others",
        "see in `kvstore status` what a larger pool would hit; pin what must stay; Redis keeps what leaves",
    ),
    MissCause.EXPIRED: Words(
        "nobody used it before its time to live was over, in memory or in Redis",
        "raise idle_ttl_seconds, or redis_ttl_seconds, above the time between two uses",
    ),
    MissCause.TAIL: Words(
        "the prompt ends inside it, or the last token has to be computed",
        "nothing: a smaller block_size would leave fewer tokens over, at the price of more blocks",
    ),
    MissCause.COLLISION: Words(
        "another block has its hash",
        "choose hash_algorithm sha256 where tenants do not trust each other; only one of the two is kept",
    ),
    MissCause.CORRUPT: Words(
        "its bytes were damaged",
        "the next request that computes it stores it again; where this goes on, test memory and network",
    ),
    MissCause.STALE: Words(
        "it was replaced while it was being looked at",
        "have readers renew their leases in time, or raise lease_seconds",
    ),
    MissCause.VERSION: Words(
        "another version of this software wrote it",
        "finish the upgrade of the servers that share this Redis",
    ),
    MissCause.TIMEOUT: Words(
        "Redis did not answer in time",
        "look at the latency of Redis; raise redis_probe_seconds where waiting is cheaper than computing",
    ),
    MissCause.UNAVAILABLE: Words(
        "Redis cannot be asked at present",
        "`kvstore status` says why; hits come from memory meanwhile",
    ),
    MissCause.SLOWER: Words(
        "Redis has it, and to load it would take longer than to compute it",
        "nothing, where that is so; a faster network to Redis changes it",
    ),
    MissCause.QUOTA: Words(
        "there was no room within the tenant's share",
        "raise pool_bytes or the share (`kvstore quota`), or have clients release their leases sooner",
    ),
    MissCause.UNKNOWN: Words(
        "nobody remembers: it was cleared, or lost with its server, or long ago",
        "ask again after its next use: from then on it is known",
    ),
}
BEING_WRITTEN = Words("somebody is storing it", "ask again in a moment")


def words_of(cause: str) -> Words | None:
    """None for a cause that this version does not know."""
    return CAUSES.get(MissCause(cause)) if cause in set(MissCause) else None
