"""LookupService: questions that change nothing."""

from __future__ import annotations

import asyncio

from kvstore.block import HASH_BYTES, Chain, Shard
from kvstore.service.codec import TIERS, chain_of, require_bounded, shard_of, tiers_of
from kvstore.service.errors import InvalidRequestError, Limit, LimitError
from kvstore.service.gate import Context
from kvstore.service.namespaces import Registered, shards_of
from kvstore.service.parts import ServiceParts
from kvstore.service.tenants import Tenant
from kvstore.store import BlockReport, Explanation, Lookup
from kvstore.v1 import lookup_pb2, lookup_pb2_grpc, types_pb2

EXPLAINED_BLOCKS_MAX = 16_384
_EXPLAINED_AT_ONCE = 256
_TURN_SECONDS = 0.002
_PAUSE_SECONDS = 0.0005
"""A new call takes several turns of the loop to be begun; a pause of no length is one."""
_MANY_ITEMS = 16
BATCH_MAX = 1024
_LONG_PROMPT_BYTES = 4 * 131_072
"""Token ids that are hashed on a thread, so that others need not wait."""


async def hashed(
    prompt: types_pb2.Prompt, known: Registered, shards: tuple[Shard, ...], max_blocks: int = 0
) -> Chain:
    """The chain of a prompt that these ranks read; what takes long to hash is hashed beside the loop."""
    long = len(prompt.token_ids) > _LONG_PROMPT_BYTES or len(prompt.extras.items) > _MANY_ITEMS
    if long and not (prompt.block_hashes and prompt.fingerprints):
        chain = await asyncio.to_thread(chain_of, prompt, known.root, max_blocks)
    else:
        chain = chain_of(prompt, known.root, max_blocks)
    require_bounded(chain, shards)
    return chain


class LookupService(lookup_pb2_grpc.LookupServiceServicer):
    """How much of a prompt is cached, where, and why not more."""

    def __init__(self, parts: ServiceParts) -> None:
        self._gate = parts.gate
        self._store = parts.store
        self._owner = parts.owner
        self._namespaces = parts.namespaces

    async def Lookup(  # noqa: N802 - the name in the protocol
        self, request: lookup_pb2.LookupRequest, context: Context
    ) -> lookup_pb2.LookupResponse:
        async with self._gate.call("Lookup", context, request) as caller:
            return await self._look_up(request, caller.tenant)

    async def BatchLookup(  # noqa: N802
        self, request: lookup_pb2.BatchLookupRequest, context: Context
    ) -> lookup_pb2.BatchLookupResponse:
        async with self._gate.call("BatchLookup", context, request) as caller:
            if len(request.requests) > BATCH_MAX:
                raise LimitError(
                    Limit.BATCH,
                    f"the batch has {len(request.requests)} prompts, at most {BATCH_MAX} are taken; split it",
                )
            answers, until = [], self._owner.now() + _TURN_SECONDS
            for each in request.requests:
                answers.append(await self._look_up(each, caller.tenant))
                if self._owner.now() > until:
                    await asyncio.sleep(_PAUSE_SECONDS)  # others are served meanwhile
                    until = self._owner.now() + _TURN_SECONDS
            return lookup_pb2.BatchLookupResponse(responses=answers)

    async def Explain(  # noqa: N802
        self, request: lookup_pb2.ExplainRequest, context: Context
    ) -> lookup_pb2.ExplainResponse:
        async with self._gate.call("Explain", context, request) as caller:
            known = self._namespaces.of_prompt(caller.tenant, request.prompt)
            named = request.HasField("shard")
            shard = shard_of(request.shard) if named else known.cuts[0].shards[0]
            chain = await hashed(request.prompt, known, (shard,))
            if len(chain) > EXPLAINED_BLOCKS_MAX:
                raise InvalidRequestError(
                    f"the prompt has {len(chain)} blocks, at most {EXPLAINED_BLOCKS_MAX} are explained; "
                    "send its first part"
                )
            explanation: Explanation = await self._owner.ask(
                lambda then: self._store.begin_explain(chain, shard, then)
            )
            reports: list[BlockReport] = []
            for start in range(0, len(chain), _EXPLAINED_AT_ONCE):
                reports += explanation.reports(start, min(len(chain), start + _EXPLAINED_AT_ONCE))
                await asyncio.sleep(_PAUSE_SECONDS)  # others are served meanwhile
            return _explained(chain, reports, known.spec.payload_bytes_on(shard))

    async def _look_up(self, request: lookup_pb2.LookupRequest, tenant: Tenant) -> lookup_pb2.LookupResponse:
        known = self._namespaces.of_prompt(tenant, request.prompt)
        shards = shards_of(known, request.prompt)
        tiers = tiers_of(list(request.tiers))
        chain = await hashed(request.prompt, known, shards, request.max_blocks)
        found: Lookup = await self._owner.ask(
            lambda then: self._store.begin_lookup(chain, shards, tiers, then)
        )
        return _looked_up(chain, found)


def _looked_up(chain: Chain, found: Lookup) -> lookup_pb2.LookupResponse:
    size = chain.root.block_size
    tiers = [
        lookup_pb2.TierTokens(
            tier=TIERS[tier],
            served_tokens=found.served.get(tier, 0),
            leading_tokens=found.alone.get(tier),
        )
        for tier in TIERS
        if tier in found.served or tier in found.alone
    ]
    return lookup_pb2.LookupResponse(
        block_size=size,
        prompt_blocks=chain.prompt_tokens // size,
        blocks_read=len(chain),
        matched_tokens=found.matched,
        verified_tokens=found.verified,
        tiers=tiers,
    )


def _explained(chain: Chain, reports: list[BlockReport], payload_bytes: int) -> lookup_pb2.ExplainResponse:
    size = chain.root.block_size
    blocks = [
        lookup_pb2.BlockReport(
            index=block,
            block_hash=chain.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES],
            tiers=[TIERS[tier] for tier in report.tiers],
            cause=report.cause or "",
            being_written=report.being_written,
            payload_bytes=payload_bytes,
            age_seconds=report.age_seconds,
            idle_seconds=report.idle_seconds,
        )
        for block, report in enumerate(reports)
    ]
    return lookup_pb2.ExplainResponse(
        block_size=size, blocks=blocks, tail_tokens=chain.prompt_tokens - len(chain) * size
    )
