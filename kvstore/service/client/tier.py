"""A tier whose blocks are in a sidecar, where other workers and engines find them too.

Blocks are copied to and from the sidecar's pool file where it can be mapped, and streamed elsewhere. A
sidecar knows prompts, not single blocks: rows are asked for as a part of the chain that they come from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hashing import Root
from kvstore.block import HASH_BYTES, WHOLE, BlockRows, Chain, MissCause, Shard, TierName
from kvstore.errors import KVStoreError
from kvstore.service.client.blocking import Client, ClientNamespace, HeldLease
from kvstore.service.client.options import Clock, Outcome
from kvstore.spec import NamespaceSpec
from kvstore.store.write import BlockStatus
from kvstore.tiers.base import LoadResult, Payload, SaveOutcome, TierMatch, TierStatus
from kvstore.tiers.memory import payload_checksum

_log = logging.getLogger(__name__)
_GAPS_MAX = 64
"""Leases that one load takes to get at what follows blocks that are not there."""
_WAIT_SHARE = 0.8
"""Of the time of a load, what the sidecar may wait for its Redis: the rest is for the answer and the copy."""
_WAIT_SECONDS_MAX = 30.0
_LATE_SECONDS = 0.01
"""A call that was cut off by the deadline may end a little before it."""
_NO_ANSWER = (MissCause.TIMEOUT, MissCause.UNAVAILABLE)
_SAVED = {
    BlockStatus.YOURS: SaveOutcome.STORED,
    BlockStatus.PRESENT: SaveOutcome.PRESENT,
    BlockStatus.PENDING: SaveOutcome.PRESENT,
    BlockStatus.REFUSED: SaveOutcome.FULL,
}
_UNSAVED = {
    MissCause.TIMEOUT: SaveOutcome.TIMEOUT,
    MissCause.UNAVAILABLE: SaveOutcome.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The last blocks of a prompt, from ``first`` on, as the sidecar names them."""

    namespace: ClientNamespace
    chain: Chain
    first: int


class SidecarTier:
    """Blocks in a sidecar. Thread-safe; every call may block until its deadline.

    The sidecar may be away, come, and go: that costs hits. Whether one block without those before it
    is there cannot be asked, so ``match`` says no; it keeps heads longer than what hangs from them.
    """

    def __init__(self, client: Client, specs: Iterable[NamespaceSpec], clock: Clock) -> None:
        """Blocks of ``specs`` alone; ``client`` has the same ``clock``, and is closed with the tier."""
        self._client = client
        self._clock = clock
        self._specs = {spec.root.digest: spec for spec in specs}
        self._namespaces: dict[tuple[bytes, int, int], ClientNamespace] = {}
        self._complaint = ""

    @property
    def name(self) -> TierName:
        return TierName.SIDECAR

    def greet(self, seconds: float) -> None:
        """Find out whether the sidecar is there, in so many seconds; ``status`` and the log then say so."""
        try:
            with self._client.until(self._clock() + seconds):
                for spec in self._specs.values():
                    self._namespace(spec, WHOLE).register()
        except KVStoreError as error:
            self._complain(error)

    def match(self, rows: BlockRows, deadline: float) -> TierMatch:
        """The leading run that the sidecar or the Redis below it has, with the blocks before it."""
        if not len(rows):
            return TierMatch(0, None)
        head = rows.slice(*_consecutive(rows)[0])
        try:
            with self._client.until(deadline):
                found = self._look_up(head, deadline)
                self._complaint = ""
        except KVStoreError as error:
            self._complain(error)
            found = TierMatch(0, MissCause.UNAVAILABLE)
        ended = found.cause or MissCause.COLD
        return TierMatch(found.blocks, None if found.blocks == len(rows) else ended)

    def load(self, rows: BlockRows, destinations: Sequence[Payload], deadline: float) -> LoadResult:
        """See ``Tier.load``. Waits for what the sidecar gets from its Redis meanwhile.

        A damaged block stays in the sidecar: nothing of it is used, and it is found again each time.
        """
        assert len(destinations) == len(rows), "one destination a block"
        result = LoadResult()
        for start, stop in _consecutive(rows):
            self._load_run(rows.slice(start, stop), destinations[start:stop], deadline, result)
        return result

    def save(
        self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int], deadline: float
    ) -> list[SaveOutcome]:
        """See ``Tier.save``. A block whose hash another one has is FULL, too: the sidecar does not say."""
        assert rows.tokens is not None, "a save needs the tokens, to store them beside the payload"
        outcomes: list[SaveOutcome] = []
        for start, stop in _consecutive(rows):
            part, count = slice(start, stop), stop - start
            try:
                with self._client.until(deadline):
                    outcomes += self._write(
                        rows.slice(start, stop), payloads[part], checksums[part], deadline
                    )
                    self._complaint = ""
            except KVStoreError as error:
                self._complain(error)
                outcomes += [SaveOutcome.UNAVAILABLE] * count
        return outcomes

    def discard(self, rows: BlockRows, deadline: float) -> int:
        """None: others use a sidecar's blocks, and it decides itself what it gives up."""
        return 0

    def status(self) -> TierStatus:
        """As the last calls found it."""
        outcome, reason = self._client.state
        return TierStatus(outcome is Outcome.OK and not self._complaint, self._complaint or reason)

    def close(self) -> None:
        self._client.close()

    def _look_up(self, rows: BlockRows, deadline: float) -> TierMatch:
        part = self._part(rows, deadline)
        if isinstance(part, MissCause):
            return TierMatch(0, part)
        found = part.namespace.lookup(part.chain)
        if found.outcome is not Outcome.OK:
            return TierMatch(0, self._no_answer(deadline))
        blocks = found.matched_tokens // found.block_size - part.first
        return TierMatch(min(max(0, blocks), len(rows)), None)

    def _load_run(
        self, rows: BlockRows, destinations: Sequence[Payload], deadline: float, result: LoadResult
    ) -> None:
        """Append the outcomes of consecutive blocks, each gap of which takes another lease."""
        at = gaps = 0
        while at < len(rows):
            try:
                with self._client.until(deadline):
                    sums, cause = self._read(rows.slice(at, len(rows)), destinations[at:], deadline)
                    self._complaint = ""
            except KVStoreError as error:
                self._complain(error)
                sums, cause = [], MissCause.UNAVAILABLE
            missed = min(1, len(rows) - at - len(sums))
            gaps += missed
            if cause in _NO_ANSWER or gaps == _GAPS_MAX:
                missed = len(rows) - at - len(sums)
            result.causes += [None] * len(sums) + [cause] * missed
            result.checksums += sums + [0] * missed
            at += len(sums) + missed

    def _read(
        self, rows: BlockRows, destinations: Sequence[Payload], deadline: float
    ) -> tuple[list[int], MissCause]:
        """Checksums of the leading blocks that were copied and are right, and what is wrong with the next."""
        part = self._part(rows, deadline)
        if isinstance(part, MissCause):
            return [], part
        size = part.namespace.spec.payload_bytes_on(rows.shard)
        fitting = next((at for at, each in enumerate(destinations) if len(each) != size), len(destinations))
        if not fitting:
            return [], MissCause.COLLISION
        seconds = min(max(0.0, deadline - self._clock()) * _WAIT_SHARE, _WAIT_SECONDS_MAX)
        lease = part.namespace.acquire(part.chain, wait_seconds=seconds, first_block=part.first)
        sums: list[int] = []
        try:
            stored = lease.checksums(rows.shard)
            count = lease.copy_out(destinations[:fitting], rows.shard)
            sums = _intact(destinations[:count], stored)
        finally:
            lease.release(len(sums))  # where there is no time left, the client's own thread does it
        if len(sums) < count:
            return sums, MissCause.CORRUPT
        return sums, MissCause.COLLISION if count == fitting else self._cause(lease, deadline)

    def _write(
        self, rows: BlockRows, payloads: Sequence[Payload], checksums: Sequence[int], deadline: float
    ) -> list[SaveOutcome]:
        part = self._part(rows, deadline)
        if isinstance(part, MissCause):
            return [_UNSAVED.get(part, SaveOutcome.REFUSED)] * len(rows)
        size = part.namespace.spec.payload_bytes_on(rows.shard)
        if any(len(each) != size for each in payloads):
            return [SaveOutcome.REFUSED] * len(rows)
        with part.namespace.write(part.chain, shard=rows.shard, first_block=part.first) as write:
            ours = [at for at, status in enumerate(write.status) if status is BlockStatus.YOURS]
            write.copy_in([payloads[at] for at in ours], [checksums[at] for at in ours])
        outcomes = [_SAVED[status] for status in write.status]
        if write.outcome is Outcome.OK:
            return outcomes
        failed = _UNSAVED[self._no_answer(deadline)]
        if write.outcome is Outcome.REFUSED:
            failed = SaveOutcome.FULL
        return [outcome if outcome is SaveOutcome.PRESENT else failed for outcome in outcomes]

    def _part(self, rows: BlockRows, deadline: float) -> _Part | MissCause:
        """How to ask for consecutive rows; why nothing can be had, where that is known."""
        spec, chain = self._specs.get(rows.namespace), rows.chain
        if spec is None:
            return MissCause.COLD
        if chain is None:
            return MissCause.UNKNOWN
        first, stop = int(rows.indexes[0]), int(rows.indexes[-1]) + 1
        own = chain.rows(rows.shard, first, stop)
        if own.hashes != rows.hashes or own.parents != rows.parents:
            return MissCause.COLLISION
        namespace = self._namespace(spec, rows.shard)
        if namespace.root is None:
            namespace.register()
        if namespace.root is None:
            return self._no_answer(deadline)
        named = _named(chain, namespace.root, rows.namespace, stop)
        if named is None or not (namespace.mapped or named.known_by_tokens):
            return MissCause.UNKNOWN  # without tokens nobody can compare
        return _Part(namespace, named, first)

    def _namespace(self, spec: NamespaceSpec, shard: Shard) -> ClientNamespace:
        key = spec.root.digest, shard.tp_size, shard.pp_size
        known = self._namespaces.get(key)
        if known is None:
            made = self._client.namespace(spec, tp_size=shard.tp_size, pp_size=shard.pp_size)
            known = self._namespaces.setdefault(key, made)
        return known

    def _cause(self, lease: HeldLease, deadline: float) -> MissCause:
        """Why a lease's run ends."""
        if lease.pending:
            return MissCause.TIMEOUT
        cause = lease.cause or MissCause.STALE
        return self._no_answer(deadline) if cause is MissCause.UNAVAILABLE else cause

    def _no_answer(self, deadline: float) -> MissCause:
        late = self._clock() > deadline - _LATE_SECONDS
        return MissCause.TIMEOUT if late else MissCause.UNAVAILABLE

    def _complain(self, error: KVStoreError) -> None:
        """A mistake that each request would repeat, or a server of another version: said once."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            _log.warning("the sidecar cannot be used: %s", error)


def _consecutive(rows: BlockRows) -> list[tuple[int, int]]:
    """The rows as runs [start, stop) of blocks that follow one another."""
    if not len(rows):
        return []
    cuts = (np.flatnonzero(np.diff(rows.indexes.astype(np.int64)) != 1) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(rows)], strict=True))


def _named(chain: Chain, root: Root, namespace: bytes, stop: int) -> Chain | None:
    """The first ``stop`` blocks under the sidecar's root, which may hold a tenant's salt.

    None where they would have to be hashed anew, and the tokens are not known.
    """
    tokens = None if chain.tokens is None else chain.tokens[:stop]
    if root.digest != namespace:
        return None if tokens is None else Chain.of(root, tokens.reshape(-1), chain.extras)
    fingerprints = None if chain.fingerprints is None else chain.fingerprints[:stop]
    return replace(
        chain,
        root=root,
        hashes=chain.hashes[: stop * HASH_BYTES],
        prompt_tokens=stop * root.block_size,
        tokens=tokens,
        fingerprints=fingerprints,
    )


def _intact(payloads: Sequence[Payload], stored: Sequence[int]) -> list[int]:
    """Checksums of the leading payloads that are what their writers summed."""
    sums: list[int] = []
    for payload, expected in zip(payloads, stored, strict=False):
        if payload_checksum(payload) != expected:
            break
        sums.append(expected)
    return sums
