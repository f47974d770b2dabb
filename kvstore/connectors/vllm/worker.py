"""The connector in a worker's process: copies blocks between one rank's memory and the sidecar's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.block import Shard
from kvstore.connectors.vllm.errors import UnsupportedError
from kvstore.connectors.vllm.groups import CacheGroups
from kvstore.connectors.vllm.layout import EngineBlocks, GroupedBlocks, map_blocks
from kvstore.connectors.vllm.messages import LoadJob, Orders, Progress, SaveJob
from kvstore.connectors.vllm.tally import Tally
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client import BlockStatus, Client, ClientNamespace, Outcome, StagedWrite
from kvstore.spec import NamespaceSpec

_log = logging.getLogger(__name__)
_LOADERS = 2
_PATIENCE_SECONDS = 0.004
"""What a step without tokens waits for a transfer to end, instead of asking again at once."""
_PIECE_BYTES = 64 * 2**20
"""A write is cut into pieces of about so much: each counts against what a client may have staged."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which worker this is. With one rank there is nobody to wait for before a save is published."""

    shard: Shard
    ranks: int
    groups: CacheGroups


class WorkerSide:
    """One rank's loads and saves. Called by one thread; copies on others."""

    def __init__(
        self, client: Client, rank: Rank, tally: Tally, clock: Callable[[], float], *, asynchronous: bool
    ) -> None:
        """With ``asynchronous`` loads run beside the engine's steps, else before they go on."""
        self._client = client
        self._rank = rank
        self._tally = tally
        self._clock = clock
        self._asynchronous = asynchronous
        self._blocks: EngineBlocks | GroupedBlocks | None = None
        self._namespaces: dict[NamespaceSpec, ClientNamespace] = {}
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kvstore-load")
        self._savers = ThreadPoolExecutor(1, thread_name_prefix="kvstore-save")
        self._loading: dict[Future[int], LoadJob] = {}
        self._filling: dict[int, tuple[SaveJob, Future[list[StagedWrite]]]] = {}
        self._saving: dict[Future[bool], int] = {}
        self._bad: set[int] = set()
        self._failed: set[str] = set()
        self._progress = Progress()

    @property
    def failures(self) -> dict[Outcome, int]:
        return self._client.failures

    def register(self, tensors: Mapping[str, torch.Tensor], blocks: int) -> None:
        """Learn where the engine's blocks are; what cannot be copied faithfully is not served."""
        try:
            self._blocks = map_blocks(tensors, self._rank.groups, blocks)
        except UnsupportedError as error:
            self._refuse(error)

    # In the order of a step.

    def load(self, orders: Orders) -> None:
        """Begin the step's loads; synchronous ones are over on return."""
        fence = None if self._blocks is None or not orders.loads else self._blocks.fence()
        for job in orders.loads:
            self._loading[self._loaders.submit(self._load, job, fence)] = job
        if not self._asynchronous:
            wait(self._loading)
            self._collect_loads()

    def save(self, orders: Orders) -> None:
        """Begin the step's saves, whose blocks have been computed when this is called."""
        for job_id, good in orders.verdicts.items():
            filling = self._filling.pop(job_id, None)
            if filling is not None:
                job, writes = filling
                self._saving[self._savers.submit(self._publish, job, writes, good)] = job_id
        fence = None if self._blocks is None or not orders.saves else self._blocks.fence()
        for job in orders.saves:
            self._progress.computed[job.job_id] += 1
            if self._blocks is None:
                self._progress.ended[job.job_id] += 1
            elif self._rank.ranks > 1:
                self._filling[job.job_id] = job, self._savers.submit(self._fill, job, fence)
            elif self._bad.isdisjoint(job.block_ids):
                self._saving[self._savers.submit(self._store, job, fence)] = job.job_id
            else:
                # This step has computed them from blocks that could not be loaded.
                self._progress.ended[job.job_id] += 1

    def finished_loads(self, orders: Orders) -> set[str]:
        """Ids of requests whose asynchronous load is over, well or not, since the last call."""
        under_way: list[Future[Any]] = [*self._loading, *self._saving]
        under_way += [writes for _, writes in self._filling.values()]
        if orders.idle and under_way:
            wait(under_way, _PATIENCE_SECONDS, FIRST_COMPLETED)
        for future in [each for each in self._saving if each.done()]:
            job_id = self._saving.pop(future)
            self._progress.ended[job_id] += 1
            if future.exception() is not None:
                _log.error("kvstore save failed", exc_info=future.exception())
                self._tally.add("failed_saves", 1)
            elif future.result():
                self._progress.stored[job_id] += 1
        return self._collect_loads() if self._asynchronous else set()

    def _collect_loads(self) -> set[str]:
        finished = set()
        for future in [each for each in self._loading if each.done()]:
            job = self._loading.pop(future)
            good = 0
            if future.exception() is None:
                good = future.result()
            else:
                _log.error("kvstore load failed", exc_info=future.exception())
            if not self._rank.groups.hybrid:
                self._bad.update(job.block_ids[good:])
            elif good * self._rank.groups.width < len(job.block_ids):
                self._failed.add(job.request_id)
            self._progress.load_over(job.request_id, good)
            finished.add(job.request_id)
        return finished

    def take_bad_blocks(self) -> set[int]:
        """The engine's blocks that could not be loaded, since the last call; none of a hybrid model's."""
        bad, self._bad = self._bad, set()
        return bad

    def take_failed_loads(self) -> set[str]:
        """Requests of hybrid models whose loads failed: vLLM takes no other account of them."""
        failed, self._failed = self._failed, set()
        return failed

    def take_progress(self) -> Progress:
        progress, self._progress = self._progress, Progress()
        return progress

    def close(self) -> None:
        """End what is under way, as far as the sidecar answers."""
        for job, writes in self._filling.values():
            self._savers.submit(self._publish, job, writes, False)  # noqa: FBT003 - nobody decides any more
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._savers.shutdown(wait=True)
        self._client.close()

    # On threads of their own.

    def _load(self, job: LoadJob, fence: Any) -> int:  # noqa: ANN401 - what ``EngineBlocks.fence`` gave
        """How many of the job's leading blocks are filled, and right."""
        if self._blocks is None or job.ticket is None:
            return 0
        began = self._clock()
        borrowed = self._namespace(job.spec).borrow(job.ticket)
        views = borrowed.views(self._rank.shard)
        self._blocks.scatter(views, job.block_ids[: len(views) * self._blocks.width], fence)
        good = min(len(views), borrowed.valid(self._rank.shard))
        self._tally.add("load_seconds", self._clock() - began)
        self._tally.add("loaded_bytes", self._blocks.loaded_bytes(job.block_ids[: good * self._blocks.width]))
        return good

    def _store(self, job: SaveJob, fence: Any) -> bool:  # noqa: ANN401 - what ``EngineBlocks.fence`` gave
        """Write and publish, piece by piece; whether all of the blocks are stored now."""
        return all(
            self._commit(self._write(job, first, stop, fence), job.hints) for first, stop in self._pieces(job)
        )

    def _fill(self, job: SaveJob, fence: Any) -> list[StagedWrite]:  # noqa: ANN401
        """Write all pieces and publish none."""
        return [self._write(job, first, stop, fence) for first, stop in self._pieces(job)]

    def _publish(self, job: SaveJob, filling: Future[list[StagedWrite]], good: bool) -> bool:  # noqa: FBT001 - the verdict
        writes = filling.result()
        if good:
            stored = [self._commit(write, job.hints) for write in writes]
            return all(stored)
        for write in writes:
            write.abort()
        return False

    def _write(self, job: SaveJob, first: int, stop: int, fence: Any) -> StagedWrite:  # noqa: ANN401
        began = self._clock()
        size = job.spec.block_size
        tokens = np.frombuffer(job.token_ids, dtype="<u4", count=stop * size)
        namespace = self._namespace(job.spec)
        staged = namespace.write(tokens, shard=self._rank.shard, extras=job.extras, first_block=first)
        width = self._rank.groups.width
        ours = [
            each
            for block, status in enumerate(staged.status, first)
            if status is BlockStatus.YOURS
            for each in job.block_ids[block * width : (block + 1) * width]
        ]
        if self._blocks is not None and staged.payloads:
            self._blocks.gather(ours, staged.payloads, fence)
            self._tally.add("saved_bytes", len(staged.payloads) * self._blocks.payload_bytes)
        self._tally.add("save_seconds", self._clock() - began)
        return staged

    def _commit(self, staged: StagedWrite, hints: Hints) -> bool:
        """Whether all of the write's blocks are stored now, or about to be by somebody else."""
        began = self._clock()
        if staged.outcome is Outcome.OK:
            staged.commit(None if hints == NO_HINTS else hints)
        else:
            staged.abort()
        self._tally.add("save_seconds", self._clock() - began)
        self._tally.add("saved_blocks", staged.committed_blocks)
        if staged.outcome is not Outcome.OK:
            self._tally.add("failed_saves", 1)
        return staged.outcome is Outcome.OK and BlockStatus.REFUSED not in staged.status

    def _pieces(self, job: SaveJob) -> list[tuple[int, int]]:
        assert job.spec.payload_bytes is not None
        blocks = len(job.block_ids) // self._rank.groups.width
        step = max(1, _PIECE_BYTES // job.spec.payload_bytes)
        return [(first, min(blocks, first + step)) for first in range(job.first_block, blocks, step)]

    def _namespace(self, spec: NamespaceSpec) -> ClientNamespace:
        known = self._namespaces.get(spec)
        if known is None:
            have = 0 if self._blocks is None else self._blocks.payload_bytes
            if have > spec.payload_bytes_on(self._rank.shard):
                error = UnsupportedError(
                    f"rank {self._rank.shard} keeps {have} bytes a block, the scheduler expected at most "
                    f"{spec.payload_bytes}; divide the layers evenly over the pipeline's ranks"
                )
                self._refuse(error)
                raise error
            shard = self._rank.shard
            known = self._client.namespace(spec, tp_size=shard.tp_size, pp_size=shard.pp_size)
            known = self._namespaces.setdefault(spec, known)
        return known

    def _refuse(self, error: UnsupportedError) -> None:
        if not self._progress.refusal:
            _log.error("kvstore serves nothing: %s", error)
        self._progress.refusal = str(error)
