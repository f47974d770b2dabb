"""The scheduler's account of saves: whose blocks are pinned for them, and how far each rank is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from hashing import Extras
from kvstore.connectors.vllm.groups import first_whole
from kvstore.connectors.vllm.messages import Progress, SaveJob
from kvstore.hints import NO_HINTS, Hints
from kvstore.spec import NamespaceSpec


class BlockPool(Protocol):
    """The engine's pool of blocks, as far as it is used."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Keep blocks from being used for something else."""

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        """Let go of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The part of a request that is computed in a step or before: whole blocks of ``token_ids``.

    ``block_ids`` are as ``groups`` lists them; ``hashes`` are the engine's own, one a block.
    """

    request_id: str
    spec: NamespaceSpec
    extras: Extras | None
    token_ids: bytes
    block_ids: list[int]
    hashes: Sequence[bytes] = ()
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    order: SaveJob
    request_id: str
    hashes: Sequence[bytes]


class Saves:
    """Saves that are under way, with their blocks pinned until every rank is through with them.

    A pinned block is never given to another request, so a save may be slow, and its request end or be
    preempted. ``pinned_share`` of the engine's blocks may be pinned; beyond it saves are dropped.
    """

    def __init__(
        self,
        ranks: int,
        width: int = 1,
        pinned_share: float = 0.5,
        stored: Callable[[Sequence[bytes]], None] = lambda hashes: None,
    ) -> None:
        """``stored`` is told the engine's hashes of blocks that every rank has stored.

        Each is ``width`` blocks of the engine.
        """
        self._ranks = ranks
        self._width = width
        self._share = pinned_share
        self._pool: BlockPool | None = None
        self._ids = count(1)
        self._jobs: dict[int, _Job] = {}
        self._ended: Counter[int] = Counter()
        self._stored: Counter[int] = Counter()
        self._tell_stored = stored
        self._pinned = 0
        self._orders: list[SaveJob] = []
        self._verdicts: dict[int, bool] = {}
        self.refused = 0
        """Saves that were not begun, since too many blocks are pinned already."""

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, prefix: Prefix, first_block: int) -> bool:
        """Order a save of the blocks from ``first_block`` on; False where it has to be dropped.

        What a window has let go of is left out, with what is before it: blocks are stored whole.
        """
        if self._pool is None:
            return False
        first_block = first_whole(prefix.block_ids, self._width, first_block)
        blocks = prefix.block_ids[first_block * self._width :]
        if not blocks:
            return True
        if self._pinned + len(blocks) > self._share * len(self._pool.blocks):
            self.refused += 1
            return False
        job_id = next(self._ids)
        order = SaveJob(
            job_id,
            prefix.spec,
            prefix.extras,
            prefix.token_ids,
            first_block,
            list(prefix.block_ids),
            prefix.hints,
        )
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._pinned += len(blocks)
        self._jobs[job_id] = _Job(order, prefix.request_id, prefix.hashes[first_block:])
        self._orders.append(order)
        return True

    def disown(self) -> None:
        """What is being saved is of other weights than what the engine names by the same hashes now."""
        self._jobs = {job_id: replace(job, hashes=()) for job_id, job in self._jobs.items()}

    def take_orders(self) -> tuple[list[SaveJob], dict[int, bool]]:
        """Saves to begin, and verdicts on those that were computed, since the last call."""
        orders, verdicts = self._orders, self._verdicts
        self._orders, self._verdicts = [], {}
        return orders, verdicts

    def update(self, progress: Progress, bad_blocks: Set[int]) -> list[tuple[str, int]]:
        """Take what the ranks report of a step in which ``bad_blocks`` could not be loaded.

        Returns request id and first block of each save that is dropped for it: its blocks were
        computed from those.
        """
        dropped = []
        for job_id, ranks in progress.computed.items():
            job = self._jobs.get(job_id)
            if job is None or ranks < self._ranks:
                continue
            good = bad_blocks.isdisjoint(job.order.block_ids)
            self._verdicts[job_id] = good
            if not good:
                dropped.append((job.request_id, job.order.first_block))
        self._stored.update(progress.stored)
        for job_id, ranks in progress.ended.items():
            self._ended[job_id] += ranks
            if self._ended[job_id] >= self._ranks:
                self._end(job_id)
        return dropped

    def _end(self, job_id: int) -> None:
        del self._ended[job_id]
        everywhere = self._stored.pop(job_id, 0) >= self._ranks
        job = self._jobs.pop(job_id, None)
        if job is None or self._pool is None:
            return
        if everywhere:
            self._tell_stored(job.hashes)
        blocks = job.order.block_ids[job.order.first_block * self._width :]
        self._pinned -= len(blocks)
        # Tails first: what is reused first should be what is least likely to be asked again.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
