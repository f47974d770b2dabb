"""Raw calls to a sidecar, as any client in any language sends them, and a peer that knows the right bytes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from hashing import Root
from kvstore.block import HASH_BYTES, WHOLE, Chain, Shard
from kvstore.tiers.pool_view import PoolView
from kvstore.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    lookup_pb2,
    lookup_pb2_grpc,
    types_pb2,
)
from tests.support.valkey import eventually

BLOCK_SIZE = 16
PAYLOAD_BYTES = 1024
RPC_SECONDS = 20.0
PIECE_BYTES = 1 << 20

PRESENT = block_pb2.BLOCK_STATUS_PRESENT
BEING_WRITTEN = block_pb2.BLOCK_STATUS_BEING_WRITTEN
YOURS = block_pb2.BLOCK_STATUS_YOURS
REFUSED = block_pb2.BLOCK_STATUS_REFUSED
HOST = types_pb2.TIER_HOST
REDIS = types_pb2.TIER_REDIS

Tokens = NDArray[np.uint32]
_numbers = itertools.count(1000)


class Credentials(NamedTuple):
    """What a caller shows and trusts: a bearer token, and PEM files for TLS."""

    token: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


NOBODY = Credentials()


class Raw:
    """One connection of its own, with a stub of each service. Every call has a deadline and the token."""

    def __init__(self, address: str, credentials: Credentials = NOBODY) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 16 << 20)]
        if credentials.ca is None:
            self.channel = grpc.insecure_channel(address, options)
        else:
            self.channel = grpc.secure_channel(address, _channel_credentials(credentials), options)
        token = credentials.token
        self.lookup: Any = _Stub(lookup_pb2_grpc.LookupServiceStub(self.channel), token)
        self.blocks: Any = _Stub(block_pb2_grpc.BlockServiceStub(self.channel), token)
        self.admin: Any = _Stub(admin_pb2_grpc.AdminServiceStub(self.channel), token)

    def close(self) -> None:
        self.channel.close()

    def status(self) -> admin_pb2.GetStatusResponse:
        report: admin_pb2.GetStatusResponse = self.admin.GetStatus(admin_pb2.GetStatusRequest())
        return report

    def pool(self) -> admin_pb2.PoolReport:
        return next(tier.pool for tier in self.status().tiers if tier.tier == HOST)

    def await_quiet(self) -> admin_pb2.GetStatusResponse:
        """Wait until nobody holds anything and the pool has its full size; the status then."""

        def quiet() -> bool:
            status, pool = self.status(), self.pool()
            held = status.leases + status.writes + pool.staged_bytes + pool.quarantined_bytes
            return not held and not pool.leased_bytes and pool.reserved_bytes == pool.limit_bytes

        assert eventually(quiet, 10.0), f"something is still held: {self.status()}"
        return self.status()

    def register(
        self, spec: block_pb2.NamespaceSpec, *, tp_size: int = 1, pp_size: int = 1, **fields: Any
    ) -> Peer:
        """A client that streams, known to the server under a number that no other test's has."""
        given = {"protocol_version": 1, "client": next(_numbers), "can_map": False, **fields}
        cut = types_pb2.Parallelism(tp_size=tp_size, pp_size=pp_size)
        request = block_pb2.RegisterNamespaceRequest(spec=spec, parallelism=cut, **given)
        return Peer(self, request, self.blocks.RegisterNamespace(request))


@dataclass(frozen=True, eq=False)
class Peer:
    """A registered client. What it writes is ``payload_of`` the block, so that every byte read is known."""

    raw: Raw
    request: block_pb2.RegisterNamespaceRequest
    answer: block_pb2.RegisterNamespaceResponse

    @property
    def me(self) -> dict[str, Any]:
        """Fields by which a request says who sends it."""
        return {"client": self.request.client, "epoch": self.answer.epoch}

    @property
    def root(self) -> Root:
        spec = self.request.spec
        return Root(self.answer.namespace, spec.block_size, spec.algorithm)

    def again(self) -> Peer:
        """The same client, after it has registered anew."""
        return Peer(self.raw, self.request, self.raw.blocks.RegisterNamespace(self.request))

    def chain(self, tokens: Tokens) -> Chain:
        return Chain.of(self.root, tokens)

    def prompt(self, tokens: Tokens, **fields: Any) -> types_pb2.Prompt:
        return types_pb2.Prompt(namespace=self.answer.namespace, token_ids=tokens.tobytes(), **fields)

    def hashes(self, tokens: Tokens, **fields: Any) -> types_pb2.Prompt:
        """The prompt as somebody knows it who has no tokens."""
        chain = self.chain(tokens)
        given = {"namespace": self.answer.namespace, "prompt_tokens": len(tokens), **fields}
        return types_pb2.Prompt(block_hashes=chain.hashes, **given)

    # -- reading --------------------------------------------------------------------------------

    def look_up(self, tokens: Tokens, **fields: Any) -> lookup_pb2.LookupResponse:
        answer: lookup_pb2.LookupResponse = self.raw.lookup.Lookup(
            lookup_pb2.LookupRequest(prompt=self.prompt(tokens), **fields)
        )
        return answer

    def matched(self, tokens: Tokens) -> int:
        """Tokens of the leading run in any tier."""
        return self.look_up(tokens).matched_tokens

    def explain(self, tokens: Tokens, **fields: Any) -> lookup_pb2.ExplainResponse:
        answer: lookup_pb2.ExplainResponse = self.raw.lookup.Explain(
            lookup_pb2.ExplainRequest(prompt=self.prompt(tokens), **fields)
        )
        return answer

    def acquire(self, tokens: Tokens, request_id: str, **fields: Any) -> block_pb2.AcquireResponse:
        given = {"prompt": self.prompt(tokens), "request_id": request_id, **fields}
        answer: block_pb2.AcquireResponse = self.raw.blocks.Acquire(
            block_pb2.AcquireRequest(**self.me, **given)
        )
        return answer

    def hold(self, tokens: Tokens, request_id: str, **fields: Any) -> int:
        """Acquire a prompt that is there; the lease."""
        answer = self.acquire(tokens, request_id, **fields)
        assert answer.blocks == len(tokens) // self.root.block_size
        assert answer.lease_id
        return answer.lease_id

    def renew(self, *lease_ids: int) -> list[int]:
        """The leases that are lost."""
        request = block_pb2.RenewRequest(**self.me, lease_ids=lease_ids)
        return list(self.raw.blocks.Renew(request).lost_lease_ids)

    def release(self, lease_id: int, used_blocks: int | None = None) -> None:
        request = block_pb2.ReleaseRequest(**self.me, lease_id=lease_id, used_blocks=used_blocks)
        self.raw.blocks.Release(request)

    def read(self, lease_id: int, **fields: Any) -> tuple[bytes, list[int]]:
        """(Payloads one behind the other, their checksums), as the stream brings them."""
        pieces = list(
            self.raw.blocks.ReadBlocks(block_pb2.ReadBlocksRequest(**self.me, lease_id=lease_id, **fields))
        )
        assert all(len(piece.data) <= PIECE_BYTES for piece in pieces)
        assert not any(piece.checksums for piece in pieces[1:]), "checksums come with the first piece"
        sums = np.frombuffer(pieces[0].checksums if pieces else b"", dtype="<u8").tolist()
        return b"".join(piece.data for piece in pieces), sums

    def assert_holds(self, tokens: Tokens, shard: Shard = WHOLE) -> None:
        """A prompt's whole blocks are there, with the right bytes."""
        lease = self.hold(tokens, "assert holds")
        rank = types_pb2.Shard(**shard._asdict())
        assert self.read(lease, shard=rank)[0] == b"".join(self.payloads(tokens, shard))
        self.release(lease)

    def assert_unwritten(self, tokens: Tokens) -> None:
        """No block is visible, no slot is lost, and all of them can be written."""
        assert self.matched(tokens) == 0
        status = self.raw.await_quiet()
        assert (status.writes, status.clients) == (0, 0)
        assert self.write(tokens) == [YOURS] * (len(tokens) // self.root.block_size)
        self.assert_holds(tokens)

    # -- writing --------------------------------------------------------------------------------

    def begin(self, tokens: Tokens, shard: Shard = WHOLE, **fields: Any) -> block_pb2.BeginWriteResponse:
        given = {"prompt": self.prompt(tokens), "shard": types_pb2.Shard(**shard._asdict()), **fields}
        answer: block_pb2.BeginWriteResponse = self.raw.blocks.BeginWrite(
            block_pb2.BeginWriteRequest(**self.me, **given)
        )
        return answer

    def send(self, write_id: int, pieces: Sequence[bytes]) -> int:
        """Stream pieces as they are; the bytes that the server says came."""
        messages = [block_pb2.WriteBlocksRequest(data=piece) for piece in pieces]
        messages[0].MergeFrom(block_pb2.WriteBlocksRequest(**self.me, write_id=write_id))
        count: int = self.raw.blocks.WriteBlocks(iter(messages)).bytes
        return count

    def commit(self, write_id: int, checksums: Sequence[int]) -> int:
        """The blocks that became visible."""
        packed = np.array(checksums, dtype="<u8").tobytes()
        request = block_pb2.CommitWriteRequest(**self.me, write_id=write_id, checksums=packed)
        blocks: int = self.raw.blocks.CommitWrite(request).blocks
        return blocks

    def abort(self, write_id: int) -> None:
        self.raw.blocks.AbortWrite(block_pb2.AbortWriteRequest(**self.me, write_id=write_id))

    def write(self, tokens: Tokens, shard: Shard = WHOLE, first_block: int = 0) -> list[int]:
        """Write a prompt with the right bytes; the status of each block."""
        begun = self.begin(tokens, shard, first_block=first_block)
        payloads = self.payloads(tokens, shard, begun.statuses, first_block)
        if payloads:
            self.send(begun.write_id, cut(b"".join(payloads)))
        assert self.commit(begun.write_id, [checksum(each) for each in payloads]) == len(payloads)
        return list(begun.statuses)

    def payloads(
        self, tokens: Tokens, shard: Shard = WHOLE, statuses: bytes = b"", first_block: int = 0
    ) -> list[bytes]:
        """The right bytes of a prompt's blocks; where ``statuses`` are given, of those that are ours."""
        hashes, size = self.chain(tokens).hashes, self.size_on(shard)
        blocks = range(first_block, len(hashes) // HASH_BYTES)
        mine = [at for at in blocks if not statuses or statuses[at - first_block] == YOURS]
        return [payload_of(hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES], shard, size) for at in mine]

    def size_on(self, shard: Shard) -> int:
        """Bytes of one block on a rank."""
        return int(self.answer.payload_bytes[shard.pp_rank * shard.tp_size + shard.tp_rank])


# -- what is sent ---------------------------------------------------------------------------------


def spec(model: str, **fields: Any) -> block_pb2.NamespaceSpec:
    """A namespace of blocks of ``BLOCK_SIZE`` tokens and ``PAYLOAD_BYTES`` bytes."""
    given = {
        "format_version": 1,
        "algorithm": "xxh3_128",
        "weights_id": "0" * 40,
        "kv_dtype": "bfloat16",
        "layout": "test",
        "block_size": BLOCK_SIZE,
        "layers": 2,
        "planes": 2,
        "kv_heads": 2,
        "head_size": 8,
        "payload_bytes": PAYLOAD_BYTES,
        **fields,
    }
    return block_pb2.NamespaceSpec(model=model, **given)


def tokens_of(blocks: int, *, seed: int = 0, tail: int = 0, block_size: int = BLOCK_SIZE) -> Tokens:
    """Random tokens: prompts of one seed begin alike, those of two share no block."""
    ids = np.random.default_rng(seed).integers(1, 1 << 20, blocks * block_size, dtype=np.uint32)
    return np.concatenate((ids, np.zeros(tail, dtype=np.uint32)))


def fork(tokens: Tokens, at_block: int, seed: int = 9) -> Tokens:
    """A prompt of the same length that differs from block ``at_block`` on."""
    other = tokens.copy()
    other[at_block * BLOCK_SIZE :] += np.uint32(seed << 20)
    return other


def payload_of(block_hash: bytes, shard: Shard, size: int) -> bytes:
    seed = int.from_bytes(hashlib.sha256(block_hash + str(shard).encode()).digest()[:8])
    return np.random.default_rng(seed).bytes(size)


def checksum(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def checksums(payloads: Sequence[bytes]) -> list[int]:
    return [checksum(each) for each in payloads]


def cut(data: bytes, size: int = PIECE_BYTES) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def opened(packed: bytes) -> list[bytes]:
    """Packed hashes one by one."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


@contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[None]:
    """Calls inside end with a status whose message has all these words."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    status: Any = caught.value
    assert status.code() is code, f"{status.code()}: {status.details()}"
    missing = [word for word in words if word not in status.details()]
    assert not missing, f"{missing} not in: {status.details()}"


@contextmanager
def mapping(peer: Peer) -> Iterator[PoolView]:
    """The pool file, mapped by that client, whose file lock says that it lives."""
    view = PoolView(Path(peer.answer.pool_path), peer.answer.epoch, peer.request.client)
    try:
        yield view
    finally:
        view.close()


@contextmanager
def dialled(address: str, credentials: Credentials = NOBODY) -> Iterator[Raw]:
    raw = Raw(address, credentials)
    try:
        yield raw
    finally:
        raw.close()


# -- credentials ----------------------------------------------------------------------------------


def _channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    files = (credentials.ca, credentials.key, credentials.cert)
    return grpc.ssl_channel_credentials(*(None if each is None else each.read_bytes() for each in files))


class _Stub:
    """A stub whose calls have a deadline, and the caller's token."""

    def __init__(self, stub: Any, token: str | None) -> None:
        self._stub = stub
        self._given: dict[str, Any] = {"timeout": RPC_SECONDS}
        if token is not None:
            self._given["metadata"] = (("authorization", f"Bearer {token}"),)

    def __getattr__(self, rpc: str) -> Callable[..., Any]:
        return partial(getattr(self._stub, rpc), **self._given)
