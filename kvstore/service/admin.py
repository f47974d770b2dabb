"""AdminService: what operators see and do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from kvstore.block import TierName
from kvstore.errors import LeaseError
from kvstore.metrics import Metrics
from kvstore.pool import PoolUsage
from kvstore.service.codec import TIERS, require_text, spec_message, tiers_of
from kvstore.service.errors import DrainingError, InvalidRequestError, NotPossibleError, UnknownNamespaceError
from kvstore.service.events import Batch, Change, EventLog
from kvstore.service.gate import Caller, Context, require_admin
from kvstore.service.lookup import hashed
from kvstore.service.namespaces import shards_of
from kvstore.service.parts import ServiceParts
from kvstore.store.pins import PinnedRun
from kvstore.v1 import admin_pb2, admin_pb2_grpc, block_pb2, types_pb2
from kvstore.whatif import Estimate, WhatIf

_EVENTS_MESSAGE_BYTES = 1 << 20
_LISTED_AT_ONCE = 128
_PAUSE_SECONDS = 0.0005
_RECHECK_SECONDS = 5.0
"""How long a watcher to whom nothing happens goes on after its token has lost its validity."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """For admins only; what names a prompt is about the admin's own tenant."""

    def __init__(
        self, parts: ServiceParts, log: EventLog, metrics: Metrics, what_if: WhatIf, version: str
    ) -> None:
        """``metrics`` and ``what_if`` are those of /metrics, so that a status says the same."""
        self._parts = parts
        self._gate = parts.gate
        self._store = parts.store
        self._log = log
        self._metrics = metrics
        self._what_if = what_if
        self._version = version
        self._began = parts.owner.now()

    async def GetStatus(  # noqa: N802 - the names in the protocol
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        async with self._gate.call("GetStatus", context, request) as caller:
            require_admin(caller)
            return self._status()

    async def ListNamespaces(  # noqa: N802
        self, request: admin_pb2.ListNamespacesRequest, context: Context
    ) -> admin_pb2.ListNamespacesResponse:
        async with self._gate.call("ListNamespaces", context, request) as caller:
            require_admin(caller)
            blocks, sizes = self._resident()
            reports: list[admin_pb2.NamespaceReport] = []
            for known in self._parts.namespaces.all():
                root = known.root.digest
                tiers = [
                    block_pb2.TierBlocks(tier=TIERS[tier.name], blocks=blocks[tier.name, root])
                    for tier in self._store.memory
                ]
                reports.append(
                    admin_pb2.NamespaceReport(
                        namespace=root,
                        spec=spec_message(known.spec),
                        tenant=known.tenant,
                        tiers=tiers,
                        payload_bytes=sizes[root],
                    )
                )
                if len(reports) % _LISTED_AT_ONCE == 0:
                    await asyncio.sleep(_PAUSE_SECONDS)  # others are served meanwhile
            return admin_pb2.ListNamespacesResponse(namespaces=reports)

    async def Clear(  # noqa: N802
        self, request: admin_pb2.ClearRequest, context: Context
    ) -> admin_pb2.ClearResponse:
        async with self._gate.call("Clear", context, request) as caller:
            require_admin(caller)
            tiers = tiers_of(list(request.tiers))
            if tiers is not None and TierName.REDIS in tiers:
                raise InvalidRequestError(
                    "tiers names redis, which forgets by its own time to live; leave it out, or "
                    "flush its keys there"
                )
            known = {space.namespace for space in self._store.host.pool.spaces()}
            if request.namespace and request.namespace not in known:
                raise UnknownNamespaceError(
                    f"namespace {request.namespace.hex()} is not known; list the namespaces first"
                )
            blocks, held = self._store.clear(request.namespace or None, tiers)
            return admin_pb2.ClearResponse(blocks=blocks, held_blocks=held)

    async def Pin(  # noqa: N802
        self, request: admin_pb2.PinRequest, context: Context
    ) -> admin_pb2.PinResponse:
        async with self._gate.call("Pin", context, request) as caller:
            require_admin(caller)
            if not request.name:
                raise InvalidRequestError("the pin has no name; give it one, to unpin it by")
            known = self._parts.namespaces.of_prompt(caller.tenant, request.prompt)
            require_text("name", request.name)
            shards = shards_of(known, request.prompt)
            chain = await hashed(request.prompt, known, shards)
            self._gate.check(context)  # a pin of a tenant that went meanwhile could be ended by nobody
            try:
                name = _pin_name(caller, request.name)
                blocks = self._store.pin(name, chain, shards)
            except LeaseError as error:
                raise NotPossibleError(str(error)) from error
            return admin_pb2.PinResponse(tokens=blocks * known.spec.block_size)

    async def Unpin(  # noqa: N802
        self, request: admin_pb2.UnpinRequest, context: Context
    ) -> admin_pb2.UnpinResponse:
        async with self._gate.call("Unpin", context, request) as caller:
            require_admin(caller)
            name = _pin_name(caller, request.name)
            return admin_pb2.UnpinResponse(found=self._store.unpin(name))

    async def SetQuota(  # noqa: N802
        self, request: admin_pb2.SetQuotaRequest, context: Context
    ) -> admin_pb2.SetQuotaResponse:
        async with self._gate.call("SetQuota", context, request) as caller:
            require_admin(caller)
            self._parts.quotas.set(request.tenant, request.share_bytes)
            return admin_pb2.SetQuotaResponse()

    async def WatchEvents(  # noqa: N802
        self, request: admin_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.WatchEventsResponse]:
        async with self._gate.call("WatchEvents", context, request) as caller:
            require_admin(caller)
            epoch, log = self._parts.clients.epoch, self._log
            known = request.epoch == epoch
            sequence = request.sequence if known else log.sequence
            lost = bool(request.epoch) and not known
            # The first answer comes at once: with it the watcher has a cursor.
            yield admin_pb2.WatchEventsResponse(epoch=epoch, sequence=sequence, lost=lost)
            while not log.closed:
                self._gate.check(context)
                batch = log.after(sequence, _EVENTS_MESSAGE_BYTES)
                if batch.changes or batch.lost:
                    sequence = batch.sequence
                    yield _events_message(epoch, batch)
                else:
                    await log.wait(sequence, _RECHECK_SECONDS)
            raise DrainingError("the server is shutting down; go on from this cursor at the next one")

    def _resident(self) -> tuple[Counter[tuple[TierName, bytes]], Counter[bytes]]:
        """Blocks by memory tier and namespace, and payload bytes by namespace; in one pass, all ranks."""
        blocks: Counter[tuple[TierName, bytes]] = Counter()
        sizes: Counter[bytes] = Counter()
        for tier in self._store.memory:
            for space in tier.pool.spaces():
                blocks[tier.name, space.namespace] += len(space.ready)
                sizes[space.namespace] += len(space.ready) * space.payload_bytes
        return blocks, sizes

    def _status(self) -> admin_pb2.GetStatusResponse:
        store, parts, totals = self._store, self._parts, self._metrics.totals()
        pools = self._pools()
        tiers = [
            admin_pb2.TierReport(
                tier=TIERS[name],
                healthy=status.healthy,
                reason=status.reason,
                pool=pools.get(name),
            )
            for name, status in store.status().items()
        ]
        tenants = [
            admin_pb2.TenantReport(name=use.name, share_bytes=use.share_bytes, ready_bytes=use.ready_bytes)
            for use in parts.quotas.use()
        ]
        holders = [
            client for client in parts.clients if client.writes or store.lease_table.held_by(client.owner)
        ]
        return admin_pb2.GetStatusResponse(
            version=self._version,
            epoch=parts.clients.epoch,
            uptime_seconds=parts.owner.now() - self._began,
            pool_path=str(store.host.file.path),
            tiers=tiers,
            leases=store.leases,
            writes=store.writes,
            clients=len(holders),
            namespaces=len(parts.namespaces),
            asked_tokens=totals.asked,
            hit_tokens={str(tier): tokens for tier, tokens in totals.hits.items()},
            miss_tokens={str(cause): tokens for cause, tokens in totals.misses.items()},
            tenants=tenants,
            adopted_blocks=store.host.adopted.blocks,
            pins=list(map(_pin_report, store.pins())),
            what_if=map(_what_if_report, self._what_if.estimates()) if totals.asked else (),
        )

    def _pools(self) -> dict[TierName, admin_pb2.PoolReport]:
        usage = self._store.usage()
        return {
            tier.name: _pool_report(
                usage[tier.name], tier.pool.limit_bytes, self._metrics.unread_bytes(tier.name)
            )
            for tier in self._store.memory
        }


def _pin_name(caller: Caller, name: str) -> str:
    return f"{caller.tenant.name}/{name}"


def _pin_report(pin: PinnedRun) -> admin_pb2.PinReport:
    tenant, _, name = pin.name.partition("/")
    return admin_pb2.PinReport(name=name, tenant=tenant, tokens=pin.tokens, bytes=pin.size)


def _what_if_report(estimate: Estimate) -> admin_pb2.WhatIfReport:
    return admin_pb2.WhatIfReport(
        scale=estimate.scale,
        capacity_bytes=estimate.capacity_bytes,
        asked_tokens=estimate.asked_tokens,
        hit_tokens=estimate.hit_tokens,
    )


def _pool_report(usage: PoolUsage, limit_bytes: int, unread_bytes: int) -> admin_pb2.PoolReport:
    return admin_pb2.PoolReport(
        limit_bytes=limit_bytes,
        reserved_bytes=usage.reserved,
        free_bytes=usage.free,
        staged_bytes=usage.staged,
        ready_bytes=usage.ready,
        quarantined_bytes=usage.quarantined,
        leased_bytes=usage.leased,
        unread_bytes=unread_bytes,
    )


def _events_message(epoch: int, batch: Batch) -> admin_pb2.WatchEventsResponse:
    events = [_event_message(change) for change in batch.changes]
    return admin_pb2.WatchEventsResponse(epoch=epoch, sequence=batch.sequence, lost=batch.lost, events=events)


def _event_message(change: Change) -> admin_pb2.BlockEvent:
    tp_rank, tp_size, pp_rank, pp_size = change.shard
    return admin_pb2.BlockEvent(
        time=change.time,
        tier=TIERS[change.tier],
        namespace=change.namespace,
        shard=types_pb2.Shard(tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size),
        block_hashes=change.hashes,
        removed=change.cause is not None,
        cause=change.cause or "",
    )
