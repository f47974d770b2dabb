"""Prefill in one process, decode in another: the same tokens, whoever dies in between."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from openai import RateLimitError
from openai.types import Completion

from kvstore.config import Config
from prefill.v1 import prefill_pb2
from tests.support.prefill_workers import (
    Forks,
    PrefillWorker,
    Rpc,
    ask_of,
    pack,
    soon,
    tokens_of,
    unpack,
    worker,
)
from tests.support.proxy import Behaviour, Proxy
from tests.support.valkey import ValkeyServer, shared_valkey

__all__ = ["shared_valkey"]

pytestmark = pytest.mark.redis

NEW_TOKENS = 24
PROBE_SECONDS = Config().redis_probe_seconds
LENGTHS = (5, 34, 48, 97)
"""Shorter than a block, a tail of two, whole blocks, and one token past them."""


@pytest.fixture(scope="module")
def alone(forks: Forks) -> Iterator[PrefillWorker]:
    """A worker that shares nothing with the others: what they answer is compared with it."""
    with worker(forks, role="both") as made:
        yield made


@contextmanager
def prefill_worker(forks: Forks, redis_url: str) -> Iterator[PrefillWorker]:
    settings = {"redis_url": redis_url, "lease_seconds": "2", "landing_seconds": "20"}
    with worker(forks, role="prefill", **settings) as made:
        yield made


@contextmanager
def decode_worker(forks: Forks, valkey: ValkeyServer, *peers: PrefillWorker) -> Iterator[PrefillWorker]:
    at = ",".join(peer.grpc for peer in peers)
    with worker(forks, role="decode", redis_url=valkey.url, prefill_at=at) as made:
        yield made


@pytest.fixture(scope="module")
def far_side(forks: Forks, shared_valkey: ValkeyServer) -> Iterator[PrefillWorker]:
    """A prefill worker whose Redis says each thing later than one of role both would wait for."""
    with (
        Proxy(shared_valkey.port, Behaviour(delay_seconds=2 * PROBE_SECONDS)) as far,
        prefill_worker(forks, f"redis://127.0.0.1:{far.port}") as made,
    ):
        yield made


@pytest.fixture(scope="module")
def mortal(forks: Forks, shared_valkey: ValkeyServer) -> Iterator[PrefillWorker]:
    """A prefill worker to kill; each test that takes it finds it running."""
    with prefill_worker(forks, shared_valkey.url) as made:
        yield made


@pytest.fixture(scope="module")
def decode_side(forks: Forks, shared_valkey: ValkeyServer, mortal: PrefillWorker) -> Iterator[PrefillWorker]:
    """Asks the mortal one alone."""
    with decode_worker(forks, shared_valkey, mortal) as made:
        yield made


@pytest.fixture
def dying(mortal: PrefillWorker) -> PrefillWorker:
    if not mortal.is_running:
        mortal.start()
    return mortal


@contextmanager
def asked(side: PrefillWorker, prompt: list[int]) -> Iterator[Future[list[int]]]:
    """An answer that is on its way, once the worker has the request."""
    with Rpc(side.grpc) as rpc, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(rpc.generate, prompt, NEW_TOKENS)
        assert soon(lambda: side.total("prefill_served_requests") == 1)
        yield answer


def expected(alone: PrefillWorker, prompt: list[int]) -> list[int]:
    with Rpc(alone.grpc) as rpc:
        return rpc.generate(prompt, NEW_TOKENS)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_tokens_as_in_one_process(
    alone: PrefillWorker, dying: PrefillWorker, decode_side: PrefillWorker, length: int
) -> None:
    prompt = tokens_of(length)
    sampled = {"sampling": prefill_pb2.Sampling(temperature=0.8, top_p=0.9, seed=7)}
    with Rpc(alone.grpc) as one, Rpc(decode_side.grpc) as two:
        assert two.generate(prompt, NEW_TOKENS) == one.generate(prompt, NEW_TOKENS)
        assert two.generate(prompt, NEW_TOKENS, **sampled) == one.generate(prompt, NEW_TOKENS, **sampled)
        assert two.generate(prompt, 1) == one.generate(prompt, 1)
    assert decode_side.total("prefill_tokens_total", source="computed") == 0
    assert decode_side.total("prefill_fallbacks_total") == 0
    dying.assert_quiet()
    decode_side.assert_quiet()


def test_the_first_token_as_clients_see_it(dying: PrefillWorker, decode_side: PrefillWorker) -> None:
    """It is the prefill worker's queue and execution, and what lies between the two workers."""

    def seconds(name: str, **labels: str) -> float:
        return decode_side.total(f"prefill_front_{name}_seconds_sum", **labels)

    before, parts_before = seconds("ttft"), seconds("part")
    on_the_other_side = dying.total("prefill_ttft_seconds_sum")
    execution = seconds("part", part="execution")
    count = decode_side.total("prefill_front_ttft_seconds_count", prefilled="elsewhere")
    with Rpc(decode_side.grpc) as rpc:
        rpc.generate(tokens_of(200, seed=20), 4)
    assert decode_side.total("prefill_front_ttft_seconds_count", prefilled="elsewhere") == count + 1
    ttft = seconds("ttft") - before
    assert ttft == pytest.approx(seconds("part") - parts_before)
    assert seconds("part", part="execution") - execution > 0
    assert ttft > dying.total("prefill_ttft_seconds_sum") - on_the_other_side > 0


def test_the_openai_api_of_a_decode_worker(
    alone: PrefillWorker, dying: PrefillWorker, decode_side: PrefillWorker
) -> None:
    """``cached_tokens`` are what nobody computed: they come from the side that prefilled."""
    asked: dict[str, Any] = {"model": "tiny-chat", "prompt": tokens_of(100, seed=1), "temperature": 0}
    with alone.openai() as one, decode_side.openai() as two:
        expected = one.completions.create(**asked, max_tokens=40)
        answers = [two.completions.create(**asked, max_tokens=40) for _ in range(2)]
        assert [answer.choices[0].text for answer in answers] == [expected.choices[0].text] * 2
        assert [cached_tokens(answer) for answer in answers] == [0, 96]
        text = expected.choices[0].text
        for stop in (text[0], text[10:13]):
            stopped = two.completions.create(**asked, max_tokens=40, stop=stop)
            assert stopped.choices[0].text == text[: text.index(stop)]
            assert (stopped.choices[0].finish_reason, cached_tokens(stopped)) == ("stop", 96)
    dying.assert_quiet()
    decode_side.assert_quiet()


def cached_tokens(answer: Completion) -> int | None:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens


# -- the prefill side dies --------------------------------------------------------------------------


def test_before_it_has_begun(alone: PrefillWorker, dying: PrefillWorker, decode_side: PrefillWorker) -> None:
    """Nobody else prefills, so the decode worker does; then the one that was started again."""
    prompt = tokens_of(97, seed=2)
    with dying.frozen(), asked(decode_side, prompt) as answer:
        dying.kill()
        assert answer.result(30) == expected(alone, prompt)
    assert decode_side.total("prefill_fallbacks_total", cause="no_worker") == 1
    assert decode_side.total("prefill_front_ttft_seconds_count", prefilled="here") == 1
    dying.start()
    other = tokens_of(97, seed=3)
    with Rpc(decode_side.grpc) as rpc:
        # A worker that failed is left alone for a second.
        assert soon(
            lambda: (
                rpc.generate(other, NEW_TOKENS) == expected(alone, other)
                and dying.total("prefill_requests_total", api="Prefill", outcome="ok") > 0
            )
        )
    decode_side.assert_quiet()


def test_while_its_blocks_go_to_redis(
    alone: PrefillWorker, dying: PrefillWorker, decode_side: PrefillWorker, shared_valkey: ValkeyServer
) -> None:
    prompt = tokens_of(97, seed=4)
    with Rpc(decode_side.grpc) as rpc:
        assert soon(lambda: rpc.generate([5, 6, 7], 1) != [] and not dying.held)
    computed = dying.total("prefill_ttft_seconds_count")
    with shared_valkey.frozen(), asked(decode_side, prompt) as answer:
        assert soon(lambda: dying.total("prefill_ttft_seconds_count") > computed)
        assert dying.held.get("prefill_served_requests") == 1, "it waits for Redis to have the blocks"
        dying.kill()
        assert answer.result(30) == expected(alone, prompt)
    decode_side.assert_quiet()


def test_while_another_is_there(
    forks: Forks,
    alone: PrefillWorker,
    dying: PrefillWorker,
    far_side: PrefillWorker,
    shared_valkey: ValkeyServer,
) -> None:
    """It hands over when its Redis has the blocks, however that takes its time to say so."""
    prompt = tokens_of(97, seed=5)
    with decode_worker(forks, shared_valkey, dying, far_side) as decode:
        with dying.frozen(), asked(decode, prompt) as answer:
            dying.kill()
            assert answer.result(30) == expected(alone, prompt)
        assert far_side.total("prefill_requests_total", api="Prefill", outcome="ok") == 1
        assert decode.total("prefill_tokens_total", source="computed") == 0
        decode.assert_quiet()
    far_side.assert_quiet()


def test_after_the_handoff(
    forks: Forks, alone: PrefillWorker, dying: PrefillWorker, shared_valkey: ValkeyServer
) -> None:
    """A decode worker with an empty pool takes over a prompt that it has never seen."""
    prompt = tokens_of(97, seed=6)
    with Rpc(dying.grpc) as rpc:
        handoff = rpc.prefill(prompt, NEW_TOKENS).handoff
    dying.kill()
    with decode_worker(forks, shared_valkey, dying) as decode, Rpc(decode.grpc) as rpc:
        parts = list(rpc.stub.Resume(prefill_pb2.ResumeRequest(handoff=handoff), timeout=30))
        assert [part.admitted for part in parts] == [True] + [False] * (NEW_TOKENS - 1)
        rest = [token for part in parts for token in unpack(part.progress.token_ids)]
        assert rest == expected(alone, prompt)[1:]
        assert parts[-1].progress.finish_reason == prefill_pb2.FINISH_REASON_LENGTH
        assert decode.total("prefill_tokens_total", source="computed") == 0
        assert decode.total("prefill_tokens_total", source="redis") == 96
        decode.assert_quiet()


def test_while_the_answer_runs(
    alone: PrefillWorker, dying: PrefillWorker, decode_side: PrefillWorker
) -> None:
    prompt = tokens_of(97, seed=7)
    with Rpc(decode_side.grpc) as rpc:
        assert soon(lambda: rpc.generate([5, 6, 7], 1) != [] and not dying.held)
        parts = rpc.stub.Generate(prefill_pb2.GenerateRequest(ask=ask_of(prompt, NEW_TOKENS)), timeout=30)
        tokens = unpack(next(parts).progress.token_ids)
        dying.kill()
        tokens += [token for part in parts for token in unpack(part.progress.token_ids)]
    assert tokens == expected(alone, prompt)
    decode_side.assert_quiet()


def test_a_prefill_side_whose_queue_is_full(forks: Forks, shared_valkey: ValkeyServer) -> None:
    """Nothing is wrong with it, so nobody prefills in its place: the client is told when to come again."""
    small = {"device_bytes": "1MiB", "waiting_max": "1", "redis_url": shared_valkey.url}
    with (
        worker(forks, role="prefill", **small) as full,
        decode_worker(forks, shared_valkey, full) as decode,
        Rpc(full.grpc) as rpc,
        ThreadPoolExecutor(1) as threads,
    ):
        rpc.prefill(tokens_of(1000), 1, request_id="fills the memory")
        waits = threads.submit(rpc.prefill, tokens_of(500), 1)
        assert soon(lambda: full.total("prefill_waiting_requests") == 1)
        with decode.openai() as client, pytest.raises(RateLimitError) as refused:
            client.completions.create(model="tiny-chat", prompt="x")
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        rpc.stub.Acknowledge(prefill_pb2.AcknowledgeRequest(request_id="fills the memory"), timeout=30)
        assert waits.result(30).handoff
        decode.assert_quiet()


# -- the decode side dies ---------------------------------------------------------------------------


def test_the_decode_side_dies_before_the_handoff(
    forks: Forks, dying: PrefillWorker, shared_valkey: ValkeyServer
) -> None:
    """Whoever prefills for it notices, and keeps nothing."""
    with decode_worker(forks, shared_valkey, dying) as decode:
        with dying.frozen(), asked(decode, tokens_of(97, seed=8)) as answer:
            decode.kill()
            with pytest.raises(grpc.RpcError) as raised:
                answer.result(30)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        dying.assert_quiet()


def test_the_decode_side_dies_after_the_handoff(dying: PrefillWorker) -> None:
    """Nobody acknowledges: the lease lapses."""
    with Rpc(dying.grpc) as rpc:
        rpc.prefill(tokens_of(97, seed=9), NEW_TOKENS)
    assert dying.held == {"kvstore_leases": 1}
    dying.assert_quiet()


def test_the_decode_side_dies_while_the_answer_runs(
    forks: Forks, alone: PrefillWorker, dying: PrefillWorker, shared_valkey: ValkeyServer
) -> None:
    """Another one goes on behind what the reader has: no token twice, and none lost."""
    prompt = tokens_of(97, seed=10)
    with Rpc(dying.grpc) as rpc:
        given = rpc.prefill(
            prompt, NEW_TOKENS, sampling=prefill_pb2.Sampling(temperature=0.9, seed=3), request_id="mine"
        )
    tokens: list[int] = []
    with decode_worker(forks, shared_valkey, dying) as decode:
        for stop_at in (7, NEW_TOKENS):
            request = prefill_pb2.ResumeRequest(handoff=given.handoff, delivered_token_ids=pack(tokens))
            with Rpc(decode.grpc) as rpc:
                for part in rpc.stub.Resume(request, timeout=30):
                    tokens += unpack(part.progress.token_ids)
                    if len(tokens) == stop_at:
                        break
            if stop_at < NEW_TOKENS:
                decode.kill()
                decode.start()
        decode.assert_quiet()
    with Rpc(alone.grpc) as rpc:
        sampled = {"sampling": prefill_pb2.Sampling(temperature=0.9, seed=3)}
        assert tokens == rpc.generate(prompt, NEW_TOKENS, **sampled)[1:]
