"""prefill.v1 over gRPC: statuses, health, and what a call that is given up leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx2
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from prefill.v1 import prefill_pb2
from tests.support.prefill_workers import (
    Forks,
    PrefillWorker,
    Rpc,
    ask_of,
    pack,
    tokens_of,
    unpack,
    worker,
)

KEY = "a key of this test"


@pytest.fixture(scope="module")
def server(forks: Forks) -> Iterator[PrefillWorker]:
    with worker(forks) as made:
        yield made


@pytest.fixture
def rpc(server: PrefillWorker) -> Iterator[Rpc]:
    with Rpc(server.grpc) as made:
        yield made
    server.assert_quiet()


@pytest.fixture(scope="module")
def guarded(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillWorker]:
    """A prefill worker that wants a key, and whose Redis is not there."""
    file = tmp_path_factory.mktemp("keys") / "key"
    file.write_text(f"{KEY}\n")
    with worker(forks, role="prefill", api_key_file=str(file), redis_url="redis://127.0.0.1:1") as made:
        yield made


def generate(rpc: Rpc, ask: prefill_pb2.Ask, **options: Any) -> list[prefill_pb2.GenerateResponse]:
    return list(rpc.stub.Generate(prefill_pb2.GenerateRequest(ask=ask), timeout=30, **options))


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code(), error.details()


def test_an_answer_and_what_it_took(rpc: Rpc) -> None:
    prompt = tokens_of(100)
    first, second = (generate(rpc, ask_of(prompt, 5)) for _ in range(2))
    tokens = [token for part in first for token in unpack(part.progress.token_ids)]
    assert len(tokens) == 5
    assert [token for part in second for token in unpack(part.progress.token_ids)] == tokens
    usage = second[-1].progress.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (100, 96, 5)
    assert usage.execution_seconds > 0
    assert second[-1].progress.finish_reason == prefill_pb2.FINISH_REASON_LENGTH
    assert not any(part.progress.finish_reason for part in second[:-1])
    ended = generate(rpc, ask_of(prompt, 5, stop_ids=pack(tokens[2:3])))
    assert [token for part in ended for token in unpack(part.progress.token_ids)] == tokens[:3]
    assert ended[-1].progress.finish_reason == prefill_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("ask", "code", "says"),
    [
        (ask_of([], 5), grpc.StatusCode.INVALID_ARGUMENT, "0 tokens"),
        (ask_of([1, 503], 5), grpc.StatusCode.INVALID_ARGUMENT, "token id 503, expected 0 to 502"),
        (ask_of(tokens_of(1020), 6), grpc.StatusCode.INVALID_ARGUMENT, "expected at most 1024"),
        (ask_of([5], 0), grpc.StatusCode.INVALID_ARGUMENT, "max_new_tokens is 0, expected at least 1"),
        (prefill_pb2.Ask(token_ids=b"abc", max_new_tokens=1), grpc.StatusCode.INVALID_ARGUMENT, "3 bytes"),
        (ask_of([5], 1, model="gpt-9"), grpc.StatusCode.NOT_FOUND, "'gpt-9'"),
        (ask_of([5], 1, request_id="r" * 513), grpc.StatusCode.INVALID_ARGUMENT, "request_id has a length"),
        (ask_of([5], 1, stop_ids=pack([1] * 257)), grpc.StatusCode.INVALID_ARGUMENT, "expected at most 256"),
        (
            ask_of([5], 1, sampling=prefill_pb2.Sampling(temperature=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature is -1",
        ),
        (
            ask_of([5], 1, sampling=prefill_pb2.Sampling(temperature=1, top_p=1.5)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "top_p is 1.5",
        ),
    ],
)
def test_what_does_not_fit(rpc: Rpc, ask: prefill_pb2.Ask, code: grpc.StatusCode, says: str) -> None:
    for call in (
        lambda: generate(rpc, ask),
        lambda: rpc.stub.Prefill(prefill_pb2.PrefillRequest(ask=ask), timeout=30),
    ):
        status, details = refused(call)
        assert status is code
        assert says in details


def test_a_request_id_in_use(rpc: Rpc, server: PrefillWorker) -> None:
    """The one that has it goes on."""
    ask = ask_of(tokens_of(20), 300, request_id="mine")
    answer = rpc.stub.Generate(prefill_pb2.GenerateRequest(ask=ask), timeout=30)
    next(answer)
    status, details = refused(lambda: generate(rpc, ask))
    assert status is grpc.StatusCode.ALREADY_EXISTS
    assert "'mine' is in use" in details
    assert len(list(answer)) == 299


def test_a_damaged_handoff(rpc: Rpc) -> None:
    handoff = rpc.prefill(tokens_of(20), 5, request_id="handed")
    rpc.stub.Acknowledge(prefill_pb2.AcknowledgeRequest(request_id="handed"), timeout=30)
    rpc.stub.Acknowledge(prefill_pb2.AcknowledgeRequest(request_id="handed"), timeout=30)
    for data in (b"", handoff.handoff[:-1]):
        call = prefill_pb2.ResumeRequest(handoff=data)
        status, details = refused(lambda call=call: list(rpc.stub.Resume(call, timeout=30)))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert "no handoff" in details


def test_a_cancelled_call_frees_everything(rpc: Rpc, server: PrefillWorker) -> None:
    request = prefill_pb2.GenerateRequest(ask=ask_of(tokens_of(20), 900))
    answer = rpc.stub.Generate(request, timeout=30)
    next(answer)
    assert server.held["kvstore_leases"] == 1
    answer.cancel()
    server.assert_quiet()
    status, _ = refused(lambda: list(rpc.stub.Generate(request, timeout=0.2)))
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED


def test_calls_whose_time_is_over_while_they_are_written_to(rpc: Rpc, server: PrefillWorker) -> None:
    """The transport may say so before the call is cancelled: no defect, and nothing for the log."""

    def late(number: int) -> grpc.StatusCode:
        request = prefill_pb2.GenerateRequest(ask=ask_of(tokens_of(20, seed=number), 900))
        return refused(lambda: list(rpc.stub.Generate(request, timeout=0.2 + number / 500)))[0]

    with ThreadPoolExecutor(40) as threads:
        assert set(threads.map(late, range(40))) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    server.assert_quiet()
    assert server.total("prefill_requests_total", api="Generate", outcome="server_error") == 0
    assert "failed" not in server.log


def test_health_and_reflection(rpc: Rpc) -> None:
    stub: Any = health_pb2_grpc.HealthStub(rpc.channel)
    for service in ("", "prefill.v1.PrefillService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflected = ProtoReflectionDescriptorDatabase(rpc.channel)
    found = DescriptorPool(reflected).FindServiceByName("prefill.v1.PrefillService")
    assert [method.name for method in found.methods] == ["Generate", "Prefill", "Resume", "Acknowledge"]


def test_a_redis_that_is_not_there_is_known_before_somebody_asks(guarded: PrefillWorker) -> None:
    assert guarded.total("prefill_requests_total") == 0
    assert guarded.total("kvstore_tier_healthy", tier="redis") == 0
    assert "redis 127.0.0.1:1 is given up" in guarded.log


def test_a_key_and_a_role(guarded: PrefillWorker) -> None:
    prompt = ask_of(tokens_of(20), 5)
    request = prefill_pb2.PrefillRequest(ask=prompt)
    with Rpc(guarded.grpc) as rpc:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for call in (
                lambda metadata=metadata: rpc.stub.Prefill(request, metadata=metadata),
                lambda metadata=metadata: rpc.stub.Acknowledge(
                    prefill_pb2.AcknowledgeRequest(), metadata=metadata
                ),
            ):
                status, details = refused(call)
                assert status is grpc.StatusCode.UNAUTHENTICATED
                assert KEY not in details
        metadata = (("authorization", f"Bearer {KEY}"),)
        given = rpc.stub.Prefill(request, metadata=metadata)
        rpc.stub.Acknowledge(prefill_pb2.AcknowledgeRequest(request_id=given.request_id), metadata=metadata)
        status, details = refused(lambda: generate(rpc, prompt, metadata=metadata))
        assert status is grpc.StatusCode.FAILED_PRECONDITION
        assert "Generate is for workers of role both and decode, and this one's is prefill" in details
    with guarded.openai(KEY) as client:
        assert len(list(client.models.list())) == 1
        with pytest.raises(openai.BadRequestError, match="role is prefill"):
            client.completions.create(model="tiny-chat", prompt="x")
    with guarded.openai("wrong") as client, pytest.raises(openai.AuthenticationError, match="API key"):
        client.completions.create(model="tiny-chat", prompt="x")
    assert httpx2.get(f"{guarded.http}/v1/models").status_code == 401
    assert httpx2.get(f"{guarded.http}/health").json()["role"] == "prefill"
    guarded.assert_quiet()
