"""Requests that make no sense, and bytes that are no requests: refused by name, and nobody else notices."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from kvstore.v1 import admin_pb2, block_pb2, lookup_pb2, types_pb2
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import HOST, Peer, Raw, checksum, dialled, refused, spec, tokens_of
from tests.support.valkey import eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NO_DEFECT = {
    grpc.StatusCode.OK,
    INVALID,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
PROMPT = tokens_of(6, tail=2)
WHOLE_MODEL = types_pb2.Parallelism(tp_size=1, pp_size=1)
SERVICES = [
    (lookup_pb2.DESCRIPTOR.services_by_name["LookupService"], "lookup"),
    (block_pb2.DESCRIPTOR.services_by_name["BlockService"], "blocks"),
    (admin_pb2.DESCRIPTOR.services_by_name["AdminService"], "admin"),
]
METHODS = [
    pytest.param(stub, method, id=method.name)
    for service, stub in SERVICES
    for method in service.methods
    if method.input_type.fields
]


class Bystander(NamedTuple):
    """Another client, with a lease: what it was promised stays true whatever anybody sends."""

    peer: Peer
    lease: int

    def check(self) -> None:
        assert self.peer.renew(self.lease) == []
        assert self.peer.read(self.lease)[0] == b"".join(self.peer.payloads(PROMPT))
        assert self.peer.matched(PROMPT) == 96
        assert self.peer.raw.status().namespaces


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    path = tmp_path_factory.mktemp("malformed") / "socket"
    settings = {"drain_seconds": 2, "lease_seconds": 60, "write_seconds": 1}
    with sidecar(listen=f"unix:{path},127.0.0.1:0", **settings) as server:
        yield server


@pytest.fixture(scope="module")
def raw(server: Sidecar) -> Iterator[Raw]:
    with dialled(server.address) as raw:
        yield raw


@pytest.fixture(scope="module")
def bystander(server: Sidecar) -> Iterator[Bystander]:
    with dialled(server.address) as raw:
        peer = raw.register(spec("bystander"))
        peer.write(PROMPT)
        lease = peer.hold(PROMPT, "bystander")
        yield Bystander(peer, lease)
        peer.release(lease)


@pytest.fixture(scope="module")
def peer(raw: Raw) -> Peer:
    """Who sends the nonsense."""
    return raw.register(spec("nonsense"))


@pytest.fixture
def writer(peer: Peer) -> Peer:
    """One that makes one mistake; its namespace is nobody else's."""
    writer = peer.raw.register(spec("precise"))
    writer.write(PROMPT)
    return writer


_EDGES = {
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 32) - 1],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 2, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1],
    FieldDescriptor.CPPTYPE_INT32: [-(1 << 31), -1, 0, 1, (1 << 31) - 1],
    FieldDescriptor.CPPTYPE_ENUM: [-(1 << 31), -1, 0, 1, 2, 3, 4, 77, (1 << 31) - 1],
}


def values(field: Any) -> st.SearchStrategy[Any]:
    """The edges of a field's type, and nonsense."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(GetMessageClass(field.message_type))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return st.sampled_from([0.0, -0.0, 0.01, -1.0, 1e300, float("inf"), float("-inf"), float("nan")])
    if kind != FieldDescriptor.CPPTYPE_STRING:
        return st.sampled_from(_EDGES[kind])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.one_of(st.binary(max_size=100), st.sampled_from([b"\0" * 16, b"\xff" * 32, b"\1" * 64]))
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a type, with each field set or not."""
    fields = {
        field.name: st.lists(values(field), max_size=3) if field.is_repeated else values(field)
        for field in kind.DESCRIPTOR.fields
    }
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind(**given))


def spoil(message: Any, data: st.DataObject) -> None:
    """Put nonsense into one field, at any depth."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = data.draw(st.sampled_from(fields))
    value = getattr(message, field.name)
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and data.draw(st.booleans()):
        if not field.is_repeated:
            spoil(value, data)
        elif value:
            spoil(value[0], data)
        return
    message.ClearField(field.name)
    drawn = data.draw(st.lists(values(field), max_size=3) if field.is_repeated else values(field))
    if field.is_repeated:
        value.extend(drawn)
    elif isinstance(drawn, Message):
        value.CopyFrom(drawn)
    else:
        setattr(message, field.name, drawn)


_seeds = itertools.count(1000)


def right(method: str, peer: Peer) -> list[Message]:
    """What the call is meant for, with a lease and a write that are there."""
    peer.again()  # whatever it has said of itself meanwhile
    # The namespace may have been registered for other ways of cutting the model too.
    prompt, me = peer.prompt(PROMPT, parallelism=WHOLE_MODEL), peer.me
    lease = peer.acquire(PROMPT, "right", prompt=prompt).lease_id
    new = tokens_of(3, seed=next(_seeds))
    payloads = peer.payloads(new)
    write = peer.begin(new).write_id if method in ("CommitWrite", "AbortWrite", "WriteBlocks") else 0
    if method == "CommitWrite":
        peer.send(write, payloads)
    checksums = np.array([checksum(each) for each in payloads], dtype="<u8").tobytes()
    look_up = lookup_pb2.LookupRequest(prompt=prompt, tiers=[HOST], max_blocks=3)
    piece = block_pb2.WriteBlocksRequest(**me, write_id=write, data=b"d" * 1024)
    register = block_pb2.RegisterNamespaceRequest()
    register.CopyFrom(peer.request)
    sent: dict[str, Message] = {
        "Lookup": look_up,
        "BatchLookup": lookup_pb2.BatchLookupRequest(requests=[look_up, look_up]),
        "Explain": lookup_pb2.ExplainRequest(prompt=prompt, shard=types_pb2.Shard(tp_size=1)),
        "RegisterNamespace": register,
        "Acquire": block_pb2.AcquireRequest(**me, request_id="another", prompt=prompt),
        "Renew": block_pb2.RenewRequest(**me, lease_ids=[lease]),
        "Release": block_pb2.ReleaseRequest(**me, lease_id=lease, used_blocks=3),
        "BeginWrite": block_pb2.BeginWriteRequest(**me, prompt=peer.prompt(new)),
        "CommitWrite": block_pb2.CommitWriteRequest(**me, write_id=write, checksums=checksums),
        "AbortWrite": block_pb2.AbortWriteRequest(**me, write_id=write),
        "ReadBlocks": block_pb2.ReadBlocksRequest(**me, lease_id=lease, first_block=1, blocks=2),
        "Prefetch": block_pb2.PrefetchRequest(prompt=prompt, wait_seconds=0.01),
        "Pin": admin_pb2.PinRequest(name="pin", prompt=prompt),
        "Unpin": admin_pb2.UnpinRequest(name="pin"),
        "Clear": admin_pb2.ClearRequest(namespace=peer.answer.namespace, tiers=[HOST]),
        "SetQuota": admin_pb2.SetQuotaRequest(tenant="nobody", share_bytes=1),
        "WatchEvents": admin_pb2.WatchEventsRequest(epoch=peer.answer.epoch),
    }
    if method == "WriteBlocks":
        return [piece, block_pb2.WriteBlocksRequest(data=b"d" * 2048)]
    return [sent[method]]


def outcome(raw: Raw, stub: str, method: MethodDescriptor, sent: list[Message]) -> grpc.StatusCode:
    """How a call ends; of an endless stream the first answers do."""
    call = getattr(getattr(raw, stub), method.name)
    try:
        answer = call(iter(sent) if method.client_streaming else sent[0], timeout=10)
        if method.server_streaming:
            for count, _ in enumerate(answer):
                if count:
                    break
                if method.name == "WatchEvents":
                    answer.cancel()
                    break
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if code not in NO_DEFECT:
            pytest.fail(f"{code}: {error.details()}")
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize(("stub", "method"), METHODS)
def test_any_values_in_any_fields(
    raw: Raw, peer: Peer, bystander: Bystander, stub: str, method: MethodDescriptor
) -> None:
    """No value that a field can hold makes the server fail: INTERNAL and UNKNOWN are defects."""

    @given(st.data())
    def send(data: st.DataObject) -> None:
        sent = right(method.name, peer)
        for _ in range(data.draw(st.integers(0, 4))):
            spoil(data.draw(st.sampled_from(sent)), data)
        outcome(raw, stub, method, sent)

    send()
    bystander.check()


class TestNumbers:
    """Numbers at which arithmetic ends, in requests that are right otherwise."""

    @pytest.mark.parametrize("tokens", [(1 << 64) - 1, 1 << 63, 1 << 40])
    def test_more_tokens_than_any_prompt_has(self, raw: Raw, writer: Peer, tokens: int) -> None:
        """What a client says of itself goes into answers and into sums."""
        prompt = writer.hashes(PROMPT, prompt_tokens=tokens)
        for call in (
            lambda: raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt)),
            lambda: raw.lookup.Explain(lookup_pb2.ExplainRequest(prompt=prompt)),
            lambda: writer.acquire(PROMPT, "tokens", prompt=prompt),
        ):
            with refused(INVALID, "prompt_tokens", str(tokens)):
                call()

    def test_hashes_that_are_not_whole(self, raw: Raw, writer: Peer) -> None:
        for name, size, packed in (("block_hashes", 16, b"x" * 33), ("fingerprints", 8, b"x" * 9)):
            prompt = writer.hashes(PROMPT)
            setattr(prompt, name, packed)
            with refused(INVALID, name, str(len(packed)), str(size)):
                raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))

    def test_tokens_that_are_not_whole(self, raw: Raw, writer: Peer) -> None:
        prompt = writer.prompt(PROMPT)
        prompt.token_ids = prompt.token_ids[:-1]
        with refused(INVALID, str(len(prompt.token_ids)), "4"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))

    def test_tokens_and_hashes_of_different_prompts(self, raw: Raw, writer: Peer) -> None:
        prompt = writer.prompt(PROMPT, block_hashes=writer.chain(PROMPT).hashes[:32])
        with refused(INVALID, "2 block hashes", "98 token ids"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))

    def test_digests_that_were_cut(self, raw: Raw, writer: Peer) -> None:
        """A content digest enters in full, not in 16 or 31 bits (cases 6)."""
        prompt = writer.prompt(PROMPT, extras={"items": [{"digest": b"d" * 8, "start": 0, "length": 4}]})
        with refused(INVALID, "8 bytes", "32"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt=prompt))


class TestLongValues:
    """What is wrong is named, and cut where it is long: gRPC has room for some kilobytes of message."""

    LONG = "x" * 100_000

    def test_a_model(self, raw: Raw) -> None:
        with refused(INVALID, "model"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt={"model": self.LONG}))

    def test_a_root(self, raw: Raw) -> None:
        with refused(grpc.StatusCode.NOT_FOUND, "7878787878"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt={"namespace": self.LONG.encode()}))

    def test_a_request_id(self, writer: Peer) -> None:
        """It is kept, so it is bounded."""
        with refused(INVALID, "request_id", "100000"):
            writer.acquire(PROMPT, self.LONG)

    def test_a_tenant(self, raw: Raw) -> None:
        with refused(INVALID, "tenant"):
            raw.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant=self.LONG))

    def test_a_pin(self, raw: Raw, writer: Peer) -> None:
        request = admin_pb2.PinRequest(name=self.LONG, prompt=writer.prompt(PROMPT))
        with refused(INVALID, "name", "100000"):
            raw.admin.Pin(request)

    def test_names_in_any_script(self, raw: Raw) -> None:
        with refused(grpc.StatusCode.NOT_FOUND, "model"):
            raw.lookup.Lookup(lookup_pb2.LookupRequest(prompt={"model": "日本\n\u2028é"}))


class TestBytes:
    @pytest.mark.parametrize("body", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", os.urandom(100_000)])
    def test_bodies_that_are_no_messages(self, raw: Raw, bystander: Bystander, body: bytes) -> None:
        for service, _ in SERVICES:
            for method in service.methods:
                kind = "stream_unary" if method.client_streaming else "unary_unary"
                call: Any = getattr(raw.channel, kind)(f"/{service.full_name}/{method.name}")
                with pytest.raises(grpc.RpcError) as caught:
                    call(iter([body]) if method.client_streaming else body, timeout=5)
                assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        bystander.check()

    def test_unknown_fields_of_a_newer_client_are_skipped(self, raw: Raw, writer: Peer) -> None:
        request = lookup_pb2.LookupRequest(prompt=writer.prompt(PROMPT)).SerializeToString()
        newer = b"\xa2\x06\x03abc"  # field 100, a string
        call: Any = raw.channel.unary_unary("/kvstore.v1.LookupService/Lookup")
        answer = lookup_pb2.LookupResponse.FromString(call(request + newer, timeout=5))
        assert answer.matched_tokens == 96


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GARBAGE = {
    "nothing": b"",
    "zeros": b"\0" * 65536,
    "random": os.urandom(65536),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    "half a preface": PREFACE[:10],
    "preface and noise": PREFACE + os.urandom(65536),
    "a frame that never ends": PREFACE
    + b"\0\0\0\4\0\0\0\0\0"
    + struct.pack(">I", 0x00FFFFFF)[1:]
    + b"\0\0\0\0\0\1",
    "a flood of pings": PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\x08\x06\0\0\0\0\0abcdefgh" * 5000,
}


def connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        opened = socket.socket(socket.AF_UNIX)
        opened.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        opened = socket.create_connection((host, int(port)))
    opened.settimeout(5)
    return opened


class TestConnections:
    @pytest.mark.parametrize("place", [0, 1], ids=["unix", "tcp"])
    @pytest.mark.parametrize("kind", GARBAGE)
    def test_garbage(self, server: Sidecar, bystander: Bystander, place: int, kind: str) -> None:
        opened = [connect(server.serving["addresses"][place]) for _ in range(5)]
        for each in opened:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                each.sendall(GARBAGE[kind])
        bystander.check()
        for each in opened:
            each.close()
        bystander.check()

    @pytest.mark.parametrize("place", [0, 1], ids=["unix", "tcp"])
    def test_connections_that_say_nothing(self, server: Sidecar, bystander: Bystander, place: int) -> None:
        """Half-open connections cost a file descriptor each until they are gone, and no more."""
        folder = Path(f"/proc/{server.pid}/fd")
        before = len(list(folder.iterdir()))
        opened = [connect(server.serving["addresses"][place]) for _ in range(100)]
        bystander.check()
        for each in opened:
            each.close()
        assert eventually(lambda: len(list(folder.iterdir())) <= before + 5)
        bystander.check()

    def test_connections_that_are_reset(self, server: Sidecar, bystander: Bystander) -> None:
        for _ in range(50):
            each = connect(server.serving["addresses"][1])
            each.send(PREFACE)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()
        bystander.check()
