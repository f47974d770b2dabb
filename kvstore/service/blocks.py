"""BlockService: leases to read blocks, two-phase writes to add them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from kvstore.block import Chain, MissCause, Residency, Shard, SlotArray, TierName
from kvstore.errors import LeaseError
from kvstore.failpoints import Step
from kvstore.lease import Lease, Terms
from kvstore.service.clients import Client, OpenWrite
from kvstore.service.codec import (
    PROTOCOL_VERSION,
    TIERS,
    checksums_of,
    hints_of,
    parallelism_of,
    shard_of,
    spec_message,
    spec_of,
)
from kvstore.service.errors import InvalidRequestError, LateError, Limit, LimitError, NotPossibleError
from kvstore.service.gate import Context
from kvstore.service.lookup import hashed
from kvstore.service.namespaces import Registered, shards_of
from kvstore.service.parts import ServiceParts
from kvstore.service.places import file_offsets, generations
from kvstore.service.remembered import Remembered
from kvstore.service.streams import receive, send
from kvstore.spec import slot_bytes_for
from kvstore.store import BlockStatus
from kvstore.store.local import slots_in
from kvstore.tiers.memory import payload_checksum
from kvstore.v1 import block_pb2, block_pb2_grpc

_STATUSES = {
    BlockStatus.PRESENT: block_pb2.BLOCK_STATUS_PRESENT,
    BlockStatus.PENDING: block_pb2.BLOCK_STATUS_BEING_WRITTEN,
    BlockStatus.YOURS: block_pb2.BLOCK_STATUS_YOURS,
    BlockStatus.REFUSED: block_pb2.BLOCK_STATUS_REFUSED,
}
_WAIT_SECONDS_MAX = 60.0
PREFETCHES_MAX = 256
"""Of one tenant, that wait at the same time."""
REMEMBERED_REQUESTS = 16_384
"""Requests that were counted when nothing was leased, so that asking again does not count again."""


class BlockService(block_pb2_grpc.BlockServiceServicer):
    """Blocks in the host tier, through the pool file or through streams."""

    def __init__(self, parts: ServiceParts) -> None:
        self._gate = parts.gate
        self._store = parts.store
        self._owner = parts.owner
        self._namespaces = parts.namespaces
        self._clients = parts.clients
        self._quotas = parts.quotas
        self._failpoint = parts.failpoint
        self._counted = Remembered(REMEMBERED_REQUESTS)
        self._prefetches = itertools.count()

    async def RegisterNamespace(  # noqa: N802 - the names in the protocol
        self, request: block_pb2.RegisterNamespaceRequest, context: Context
    ) -> block_pb2.RegisterNamespaceResponse:
        async with self._gate.call("RegisterNamespace", context, request) as caller:
            if request.protocol_version != PROTOCOL_VERSION:
                raise NotPossibleError(
                    f"the client speaks protocol version {request.protocol_version}, this server "
                    f"{PROTOCOL_VERSION}; use a client and a server of the same version"
                )
            spec = spec_of(request.spec, caller.tenant.salt)
            cut = parallelism_of(request.parallelism)
            sizes = [spec.payload_bytes_on(shard) for shard in cut.shards]
            self._clients.require_number(request.client)
            self._namespaces.admit(caller.tenant, spec, cut)
            self._store.register(spec, cut.shards, group=self._quotas.group_of(caller.tenant.name))
            known = self._namespaces.add(caller.tenant, spec, cut)
            maps = request.can_map and caller.tenant.maps_pool
            self._clients.register(caller.tenant, request.client, mapped=maps)
            options = self._store.options
            return block_pb2.RegisterNamespaceResponse(
                namespace=known.root.digest,
                epoch=self._clients.epoch,
                pool_path=str(self._store.host.file.path) if maps else "",
                payload_bytes=sizes,
                siblings=[spec_message(each) for each in self._namespaces.siblings(known)],
                lease_seconds=options.lease_seconds,
                write_seconds=options.write_seconds,
            )

    async def Acquire(  # noqa: N802
        self, request: block_pb2.AcquireRequest, context: Context
    ) -> block_pb2.AcquireResponse:
        async with self._gate.call("Acquire", context, request) as caller:
            client = self._clients.get(caller.tenant, request.client, request.epoch)
            known = self._namespaces.of_prompt(caller.tenant, request.prompt)
            shards = shards_of(known, request.prompt)
            hints, seconds = hints_of(request.hints), _wait_seconds(request.wait_seconds)
            chain = await hashed(request.prompt, known, shards)
            client = self._clients.get(caller.tenant, request.client, request.epoch)  # it may have gone
            if chain.tokens is None and not client.mapped:
                raise InvalidRequestError(
                    "the prompt has no token ids, and the client cannot compare blocks itself; send them"
                )
            first_block = _first_block(request.first_block, chain)
            self._clients.admit_lease(client, request.request_id)
            self._failpoint(Step.ACQUIRE_ADMITTED)
            key = client.owner, request.request_id
            lease = self._acquire(key, chain, shards, Terms(first_block, hints))
            if lease.pending and seconds:
                await self._owner.settle(lease, min(seconds, self._store.options.lease_seconds / 2))
                if not lease.over:  # its time begins when the client learns of it
                    self._store.renew(lease)
            self._failpoint(Step.ACQUIRE_PINNED)
            if not lease.over and not lease.blocks and not lease.pending:
                # Nothing is held, so there is nothing to release: the request is counted now.
                self._store.release(lease)
                self._counted.add(key)
            return self._leased(lease, client)

    async def Renew(  # noqa: N802
        self, request: block_pb2.RenewRequest, context: Context
    ) -> block_pb2.RenewResponse:
        async with self._gate.call("Renew", context, request, ends=True) as caller:
            client = self._clients.get(caller.tenant, request.client, request.epoch)
            table = self._store.lease_table
            self._clients.admit_renewal(client, len(request.lease_ids))
            self._store.tick()
            lost = []
            for lease_id in request.lease_ids:
                lease = table.find(lease_id, client.owner)
                if lease is None:
                    lost.append(lease_id)
                else:
                    self._store.renew(lease)
            return block_pb2.RenewResponse(lost_lease_ids=lost)

    async def Release(  # noqa: N802
        self, request: block_pb2.ReleaseRequest, context: Context
    ) -> block_pb2.ReleaseResponse:
        async with self._gate.call("Release", context, request, ends=True) as caller:
            client = self._clients.get(caller.tenant, request.client, request.epoch)
            self._failpoint(Step.RELEASE_ADMITTED)
            used = request.used_blocks if request.HasField("used_blocks") else None
            hints = hints_of(request.hints) if request.HasField("hints") else None
            lease = self._store.lease_table.find(request.lease_id, client.owner)
            if lease is not None:
                self._store.release(lease, used, request.compared_blocks if client.mapped else 0, hints)
            return block_pb2.ReleaseResponse()

    async def BeginWrite(  # noqa: N802
        self, request: block_pb2.BeginWriteRequest, context: Context
    ) -> block_pb2.BeginWriteResponse:
        async with self._gate.call("BeginWrite", context, request) as caller:
            client = self._clients.get(caller.tenant, request.client, request.epoch)
            known = self._namespaces.of_prompt(caller.tenant, request.prompt)
            shard = _own_shard(known, shard_of(request.shard))
            chain = await hashed(request.prompt, known, (shard,))
            client = self._clients.get(caller.tenant, request.client, request.epoch)  # it may have gone
            self._clients.admit_name(client, request.write_id)
            self._admit_write(client, known, chain, shard, request.first_block)
            writer = client.number if client.mapped else 0
            write = self._store.write(chain, shard, first_block=request.first_block, writer=writer)
            opened = self._clients.opened(client, write, request.write_id)
            self._failpoint(Step.WRITE_STAGED)
            if context.time_remaining() == 0:
                # The caller gave up before this could be sent, and would never give the slots back.
                write.abort()
                self._clients.closed(client, opened)
                raise LateError("the deadline passed while slots were staged; begin again, with more time")
            places = file_offsets(self._store.host, write.slots) if client.mapped else None
            return block_pb2.BeginWriteResponse(
                write_id=opened.id,
                statuses=bytes(map(_STATUSES.__getitem__, write.status)),
                offsets=b"" if places is None else places.astype("<i8").tobytes(),
                seconds=self._store.options.write_seconds,
            )

    async def CommitWrite(  # noqa: N802
        self, request: block_pb2.CommitWriteRequest, context: Context
    ) -> block_pb2.CommitWriteResponse:
        async with self._gate.call("CommitWrite", context, request, ends=True) as caller:
            client = self._clients.get(caller.tenant, request.client, request.epoch)
            opened = self._clients.write_of(client, request.write_id)
            checksums = checksums_of(request.checksums)
            hints = hints_of(request.hints) if request.HasField("hints") else None
            try:
                if not opened.write.writer:
                    await _compare(opened, checksums)
                self._failpoint(Step.WRITE_COMMITTING)
                opened.write.commit(checksums, hints)
                self._failpoint(Step.WRITE_COMMITTED)
                self._owner.pump_soon()
            except BaseException:
                opened.write.abort()
                raise
            finally:
                self._clients.closed(client, opened)
            return block_pb2.CommitWriteResponse(blocks=len(opened.write.slots))

    async def AbortWrite(  # noqa: N802
        self, request: block_pb2.AbortWriteRequest, context: Context
    ) -> block_pb2.AbortWriteResponse:
        async with self._gate.call("AbortWrite", context, request, ends=True) as caller:
            client = self._clients.get(caller.tenant, request.client, request.epoch)
            self._clients.abort(client, request.write_id)
            return block_pb2.AbortWriteResponse()

    async def ReadBlocks(  # noqa: N802
        self, request: block_pb2.ReadBlocksRequest, context: Context
    ) -> AsyncIterator[block_pb2.ReadBlocksResponse]:
        async with self._gate.call("ReadBlocks", context, request, ends=True) as caller:
            client = self._clients.get(caller.tenant, request.client, request.epoch)
            lease = self._store.lease_table.get(request.lease_id, client.owner)
            shard = shard_of(request.shard)
            slots = _part(lease, shard, request.first_block, request.blocks)
            known = self._namespaces.by_root(caller.tenant, lease.chain.namespace)
            size = known.spec.payload_bytes_on(shard)
            began = self._owner.now()
            with self._clients.streaming(client):
                async for piece in send(self._store.host, lease, slots, size):
                    yield piece
            self._store.report_moved(TierName.HOST, None, len(slots) * size, began)

    async def WriteBlocks(  # noqa: N802
        self, request_iterator: AsyncIterator[block_pb2.WriteBlocksRequest], context: Context
    ) -> block_pb2.WriteBlocksResponse:
        async with self._gate.call("WriteBlocks", context, None, ends=True) as caller:
            first = await anext(request_iterator, None)
            if first is None:
                raise InvalidRequestError("the stream is empty; begin it with client, epoch and write_id")
            client = self._clients.get(caller.tenant, first.client, first.epoch)
            opened = self._clients.write_of(client, first.write_id)
            if opened.write.writer:
                raise NotPossibleError(
                    "this client maps the pool file; fill the slots there, or register without can_map"
                )
            began = self._owner.now()
            with self._clients.streaming(client):
                count = await receive(opened, first.data, request_iterator)
            self._store.report_moved(None, TierName.HOST, count, began)
            return block_pb2.WriteBlocksResponse(bytes=count)

    async def Prefetch(  # noqa: N802
        self, request: block_pb2.PrefetchRequest, context: Context
    ) -> block_pb2.PrefetchResponse:
        async with self._gate.call("Prefetch", context, request) as caller:
            known = self._namespaces.of_prompt(caller.tenant, request.prompt)
            shards = shards_of(known, request.prompt)
            chain = await hashed(request.prompt, known, shards)
            if chain.tokens is None:
                raise InvalidRequestError(
                    "the prompt has no token ids; send them: what redis has is compared with them"
                )
            owner, name = f"{caller.tenant.name}/prefetch", str(next(self._prefetches))
            if self._store.lease_table.held_by(owner) >= PREFETCHES_MAX:
                raise LimitError(
                    Limit.LEASES,
                    f"{PREFETCHES_MAX} prefetches of this tenant are waiting, at most; wait for one of them, "
                    "or ask with wait_seconds = 0",
                )
            lease = self._store.acquire_uncounted((owner, name), chain, shards, waits=False)
            # Promotions go on without the lease; it is only a way to learn how far they came.
            await self._owner.settle(lease, _wait_seconds(request.wait_seconds))
            pending = bool(lease.pending)
            self._store.release(lease)
            return block_pb2.PrefetchResponse(resident_tokens=lease.tokens, pending=pending)

    def _acquire(self, key: tuple[str, str], chain: Chain, shards: tuple[Shard, ...], terms: Terms) -> Lease:
        owner, request_id = key
        first_block = terms.first_block
        try:
            if key in self._counted:
                return self._store.acquire_uncounted(key, chain, shards, first_block=first_block)
            return self._store.acquire(
                request_id, chain, shards, owner=owner, first_block=first_block, hints=terms.hints
            )
        except LeaseError as error:
            raise NotPossibleError(str(error)) from error

    def _admit_write(
        self, client: Client, known: Registered, chain: Chain, shard: Shard, first_block: int
    ) -> None:
        slot_bytes = slot_bytes_for(known.spec.payload_bytes_on(shard))
        blocks = max(0, len(chain) - first_block)
        if not self._clients.may_stage(client, blocks * slot_bytes):
            # What is there already takes no slot; it is counted only where that decides.
            rows = chain.rows(shard, min(first_block, len(chain)))
            blocks = self._store.host.pool.residency(rows).count(Residency.MISS)
        self._clients.admit_write(client, blocks * slot_bytes)

    def _leased(self, lease: Lease, client: Client) -> block_pb2.AcquireResponse:
        if lease.over and lease.blocks:
            return block_pb2.AcquireResponse(cause=MissCause.UNKNOWN)  # released while it waited
        places = []
        if client.mapped:
            for shard in lease.shards:
                slots = slots_in(lease.segments.get(shard, ()), TierName.HOST)
                places.append(
                    block_pb2.Places(
                        offsets=file_offsets(self._store.host, slots).astype("<i8").tobytes(),
                        generations=generations(self._store.host, slots).astype("<u8").tobytes(),
                    )
                )
        tiers = [
            block_pb2.TierBlocks(tier=TIERS[tier], blocks=count)
            for tier, count in lease.hit_blocks(lease.blocks).items()
        ]
        return block_pb2.AcquireResponse(
            lease_id=0 if lease.over else lease.id,
            blocks=lease.blocks,
            pending=bool(lease.pending),
            cause="" if lease.complete else lease.cause or "",
            shards=places,
            tiers=tiers,
        )


async def _compare(opened: OpenWrite, checksums: list[int]) -> None:
    """What was streamed must have come, and be what its writer summed."""
    write = opened.write
    if write.slots.size and not opened.received:
        raise NotPossibleError(
            f"the payloads of write {opened.id} have not all come; send them with WriteBlocks first"
        )
    found = await asyncio.to_thread(lambda: [payload_checksum(payload) for payload in write.payloads])
    for place, (ours, theirs) in enumerate(zip(found, checksums, strict=False)):
        if ours != theirs:
            raise InvalidRequestError(
                f"payload {place} of write {opened.id} has checksum {ours:#018x}, the writer says "
                f"{theirs:#018x}; "
                "send xxh3_64 of each payload, and write again"
            )


def _part(lease: Lease, shard: Shard, first: int, count: int) -> SlotArray:
    slots = slots_in(lease.segments.get(shard, ()), TierName.HOST)
    stop = first + count if count else len(slots)
    if shard not in lease.shards or not first <= stop <= len(slots):
        raise InvalidRequestError(
            f"blocks {first} … {stop} of shard {shard} were asked for, the lease has {len(slots)} blocks on "
            f"{', '.join(map(str, lease.shards))}; correct the range or the shard"
        )
    return slots[first:stop]


def _own_shard(known: Registered, shard: Shard) -> Shard:
    if not any(shard in cut.shards for cut in known.cuts):
        raise InvalidRequestError(
            f"shard {shard} is none of the namespace's; register that parallelism, or correct it"
        )
    return shard


def _first_block(first_block: int, chain: Chain) -> int:
    if first_block > len(chain):
        raise InvalidRequestError(
            f"first_block is {first_block}, but the prompt has {len(chain)} whole blocks; expected 0 … "
            f"{len(chain)}: name the first block that the caller does not have"
        )
    return first_block


def _wait_seconds(seconds: float) -> float:
    if not 0 <= seconds <= _WAIT_SECONDS_MAX:
        raise InvalidRequestError(
            f"wait_seconds is {seconds}, expected 0 … {_WAIT_SECONDS_MAX:g}; correct it"
        )
    return seconds
