"""Between the messages of ``kvstore.v1`` and what the client hands out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hashing import Extras
from kvstore.block import Chain, MissCause, Shard, TierName, Uint64Array
from kvstore.errors import KVStoreError
from kvstore.hints import Hints, checked
from kvstore.service.client.options import Outcome
from kvstore.service.codec import TIER_NAMES, Parallelism, spec_of
from kvstore.spec import NamespaceSpec
from kvstore.store.write import BlockStatus
from kvstore.v1 import block_pb2, lookup_pb2, types_pb2

_STATUSES: dict[int, BlockStatus] = {
    block_pb2.BLOCK_STATUS_PRESENT: BlockStatus.PRESENT,
    block_pb2.BLOCK_STATUS_BEING_WRITTEN: BlockStatus.PENDING,
    block_pb2.BLOCK_STATUS_YOURS: BlockStatus.YOURS,
    block_pb2.BLOCK_STATUS_REFUSED: BlockStatus.REFUSED,
}


class Places(NamedTuple):
    """Where one rank's blocks are in the pool file, and their generations when they were promised."""

    offsets: NDArray[np.int64]
    generations: Uint64Array


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """A lease as the server granted it. ``lease_id`` is 0 where nothing is held."""

    lease_id: int
    blocks: int
    pending: bool
    cause: MissCause | None
    places: dict[Shard, Places]
    hit_blocks: dict[TierName, int]


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """A write as the server began it; ``offsets`` of the blocks that are the writer's, None when streamed."""

    write_id: int
    status: list[BlockStatus]
    offsets: NDArray[np.int64] | None
    seconds: float

    @property
    def yours(self) -> int:
        return self.status.count(BlockStatus.YOURS)


@dataclass(frozen=True, slots=True)
class TierTokens:
    """A tier's part of a leading run, in tokens.

    ``leading_tokens`` is the run in this tier alone; None where it was asked only for the rest.
    """

    tier: TierName
    served_tokens: int
    leading_tokens: int | None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """How much of a prompt is cached, and where; nothing is where ``outcome`` is not OK.

    ``matched_tokens`` are of the leading run in any tier, ``verified_tokens`` of the part of it
    whose token ids were compared.
    """

    outcome: Outcome
    block_size: int
    prompt_blocks: int = 0
    blocks_read: int = 0
    matched_tokens: int = 0
    verified_tokens: int = 0
    tiers: tuple[TierTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """Tokens of a prompt's leading run that are in memory now; ``pending`` when more may come."""

    outcome: Outcome
    resident_tokens: int = 0
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Acquisition:
    """What ``acquire`` is asked beside the prompt."""

    request_id: str
    wait_seconds: float
    hints: Hints
    first_block: int


def prompt_message(chain: Chain, extras: Extras | None, cut: Parallelism) -> types_pb2.Prompt:
    """A prompt with all that is known of it. ``extras`` matter only where the server has to hash."""
    message = types_pb2.Prompt(
        namespace=chain.namespace,
        token_ids=b"" if chain.tokens is None else chain.tokens.tobytes(),
        block_hashes=chain.hashes,
        fingerprints=b"" if chain.fingerprints is None else chain.fingerprints.tobytes(),
        prompt_tokens=chain.prompt_tokens,
        parallelism=types_pb2.Parallelism(**cut._asdict()),
    )
    if extras is not None and chain.fingerprints is None:
        message.extras.CopyFrom(extras_message(extras))
    return message


def extras_message(extras: Extras) -> types_pb2.Extras:
    items = [
        types_pb2.ContentItem(digest=item.digest, start=item.start, length=item.length)
        for item in extras.items
    ]
    embeddings = [digest or b"" for digest in extras.embeddings]
    return types_pb2.Extras(request_salt=extras.request_salt or b"", items=items, embeddings=embeddings)


def hints_message(hints: Hints | None) -> block_pb2.Hints | None:
    """HintsError for what the server would refuse; None where nothing is said."""
    if hints is None:
        return None
    checked(hints)
    return block_pb2.Hints(ended=hints.ended, priority=hints.priority, idle_seconds=hints.idle_seconds)


def shard_message(shard: Shard) -> types_pb2.Shard:
    return types_pb2.Shard(**shard._asdict())


def promise_of(answer: block_pb2.AcquireResponse, shards: Sequence[Shard]) -> Promise:
    places = {
        shard: Places(np.frombuffer(each.offsets, dtype="<i8"), np.frombuffer(each.generations, dtype="<u8"))
        for shard, each in zip(shards, answer.shards, strict=False)
    }
    for shard, each in places.items():
        expect_count(len(each.offsets), answer.blocks, f"offsets on shard {shard}")
        expect_count(len(each.generations), answer.blocks, f"generations on shard {shard}")
    return Promise(
        answer.lease_id,
        answer.blocks,
        answer.pending,
        _cause_of(answer.cause),
        places,
        {TIER_NAMES[tier.tier]: tier.blocks for tier in answer.tiers},
    )


def slots_of(answer: block_pb2.BeginWriteResponse, *, mapped: bool) -> Slots:
    status = [_STATUSES[value] for value in answer.statuses]
    offsets = np.frombuffer(answer.offsets, dtype="<i8") if mapped else None
    slots = Slots(answer.write_id, status, offsets, answer.seconds)
    if offsets is not None:
        expect_count(len(offsets), slots.yours, "offsets of the blocks to write")
    return slots


def lookup_of(answer: lookup_pb2.LookupResponse) -> LookupResult:
    tiers = tuple(
        TierTokens(
            TIER_NAMES[each.tier],
            each.served_tokens,
            each.leading_tokens if each.HasField("leading_tokens") else None,
        )
        for each in answer.tiers
    )
    return LookupResult(
        Outcome.OK,
        answer.block_size,
        answer.prompt_blocks,
        answer.blocks_read,
        answer.matched_tokens,
        answer.verified_tokens,
        tiers,
    )


def sizes_of(answer: block_pb2.RegisterNamespaceResponse, shards: Sequence[Shard]) -> dict[Shard, int]:
    expect_count(len(answer.payload_bytes), len(shards), "payload sizes")
    return dict(zip(shards, answer.payload_bytes, strict=True))


def specs_of(messages: Iterable[block_pb2.NamespaceSpec]) -> tuple[NamespaceSpec, ...]:
    return tuple(spec_of(message, None) for message in messages)


def _cause_of(cause: str) -> MissCause | None:
    if not cause:
        return None
    # A newer server may know causes that this client does not.
    return MissCause(cause) if cause in MissCause.__members__.values() else MissCause.UNKNOWN


def expect_count(found: int, expected: int, what: str) -> None:
    """KVStoreError where an answer does not fit its question."""
    if found != expected:
        raise KVStoreError(
            f"the server sent {found} {what}, expected {expected}; use a client and a server of one version"
        )
