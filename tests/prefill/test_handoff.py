"""Prefill on one worker, decode on another: the combined cache as bytes, and nothing computed twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hashing import ContentItem, Extras
from kvstore.block import TierName
from prefill.assemble import Worker
from prefill.engine import Engine, EngineOptions
from prefill.errors import HandoffError, PromptError, RequestError
from prefill.handoff import Handoff
from prefill.model import LoadedModel
from prefill.output import StepOutput
from prefill.request import Result, Sampling
from tests.support.stores import FakeClock
from tests.support.valkey import ValkeyServer, shared_valkey, valkey
from tests.support.workers import (
    BLOCK_SIZE,
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    empty,
    hand_over,
    load_tiny,
    make_worker,
    prompt_of,
    request_of,
    resident,
    watch,
    work_off,
)

__all__ = ["shared_valkey", "valkey"]

NEW_TOKENS = 24
"""More than a block: what was handed over is built upon, and published."""

# Shorter than a block, a tail of two, whole blocks, and one token past them.
LENGTHS = (5, 34, 48, 97)
EXTRAS = Extras(
    request_salt=b"tenant",
    items=(ContentItem(hashlib.sha256(b"image").digest(), 3, 20),),
    embeddings=(None, hashlib.sha256(b"embeddings").digest()),
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("models"))


@contextmanager
def two_workers(loaded: LoadedModel, redis_url: str) -> Iterator[tuple[Worker, Worker]]:
    """A prefill side and a decode side that share nothing but redis."""
    options = WorkerOptions(redis_url=redis_url)
    with make_worker(loaded, options) as prefill_side, make_worker(loaded, options) as decode_side:
        yield prefill_side, decode_side


def expected_tokens(loaded: LoadedModel, length: int, seed: int = 0) -> list[int]:
    with make_worker(loaded) as worker:
        request = request_of("alone", prompt_of(length, seed), NEW_TOKENS, reuse=False)
        return answer(worker.engine, request).tokens


def decode(worker: Worker, message: bytes) -> Result:
    worker.engine.resume(Handoff.from_bytes(message))
    [result] = work_off(worker.engine).values()
    return result


@pytest.mark.redis
@pytest.mark.parametrize("extras", [None, EXTRAS], ids=["plain", "with extras"])
@pytest.mark.parametrize("length", LENGTHS)
def test_decode_computes_nothing_of_the_prompt_again(
    loaded: LoadedModel,
    valkey: ValkeyServer,
    length: int,
    extras: Extras | None,
) -> None:
    expected = expected_tokens(loaded, length)
    whole = length // BLOCK_SIZE * BLOCK_SIZE
    with two_workers(loaded, valkey.url) as (prefill_side, decode_side), watch(loaded.model) as seen:
        handoff = hand_over(
            prefill_side.engine, request_of("r", prompt_of(length), NEW_TOKENS, extras=extras)
        )
        assert prefill_side.store.drain(10.0)
        assert seen.tokens == [length]
        assert handoff.output == expected[:1]
        assert len(handoff.tail) == (length - whole) * 2 * loaded.spec.layers * loaded.spec.row_bytes
        seen.clear()
        result = decode(decode_side, handoff.to_bytes())
        assert seen.tokens == [1] * (NEW_TOKENS - 1)
        assert result.tokens == expected
        assert result.computed_tokens == 0
        assert result.cached == ({TierName.REDIS: whole} if whole else {})
        assert prefill_side.store.leases == 1
        prefill_side.engine.acknowledge("r")
        prefill_side.engine.acknowledge("r")
        assert_quiet(prefill_side)
        assert_quiet(decode_side)
        said = np.concatenate([prompt_of(length), np.array(expected, dtype=np.uint32)])
        assert resident(decode_side, said, extras)[TierName.DEVICE] == (length + NEW_TOKENS - 1) // BLOCK_SIZE


@pytest.mark.redis
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_that_are_gone_are_computed_again(
    loaded: LoadedModel,
    valkey: ValkeyServer,
    length: int,
) -> None:
    """The tail block builds on the blocks before it, so where one is gone it is computed again too."""
    expected = expected_tokens(loaded, length)
    with two_workers(loaded, valkey.url) as (prefill_side, decode_side), watch(loaded.model) as seen:
        message = hand_over(prefill_side.engine, request_of("r", prompt_of(length), NEW_TOKENS)).to_bytes()
        assert prefill_side.store.drain(10.0)
        valkey.clear()
        seen.clear()
        result = decode(decode_side, message)
        lost = length if length >= BLOCK_SIZE else 0
        assert seen.tokens == [lost + 1] + [1] * (NEW_TOKENS - 2)
        assert (result.tokens, result.computed_tokens) == (expected, lost)
        assert_quiet(decode_side)


@pytest.mark.redis
def test_handoffs_join_a_batch_that_runs(loaded: LoadedModel, valkey: ValkeyServer) -> None:
    with two_workers(loaded, valkey.url) as (prefill_side, decode_side):
        handoffs = [
            hand_over(prefill_side.engine, request_of(f"r{length}", prompt_of(length), NEW_TOKENS))
            for length in LENGTHS
        ]
        assert prefill_side.store.drain(10.0)
        decode_side.engine.submit(request_of("own", prompt_of(70), NEW_TOKENS))
        decode_side.engine.step()
        for handoff in handoffs:
            decode_side.engine.resume(handoff)
            decode_side.engine.step()
        results = work_off(decode_side.engine)
        for length in LENGTHS:
            assert results[f"r{length}"].tokens == expected_tokens(loaded, length)
        assert results["own"].tokens == expected_tokens(loaded, 70)
        assert_quiet(decode_side)


def test_two_engines_over_one_store(loaded: LoadedModel) -> None:
    """Each holds its own lease on the same device blocks; the owner tells them apart."""
    expected = expected_tokens(loaded, 48)
    with make_worker(loaded) as worker, watch(loaded.model) as seen:
        parts = (worker.runner, worker.memory, worker.store, worker.spec.root)
        other = Engine(*parts, clock=FakeClock(), options=EngineOptions(owner="decode"))
        handoff = hand_over(worker.engine, request_of("r", prompt_of(48), NEW_TOKENS))
        seen.clear()
        other.resume(handoff)
        assert other.step() == [StepOutput("r", admitted=True), StepOutput("r", expected[1])]
        assert worker.store.leases == 2
        worker.engine.acknowledge("r")
        empty(device_of(worker))
        result = work_off(other)["r"]
        assert seen.tokens == [1] * (NEW_TOKENS - 1)
        assert (result.tokens, result.cached) == (expected, {TierName.DEVICE: 48})
        assert_quiet(worker)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handoff_of_one_token_is_over_at_once(loaded: LoadedModel, length: int) -> None:
    with make_worker(loaded) as prefill_side, make_worker(loaded) as decode_side:
        handoff = hand_over(prefill_side.engine, request_of("r", prompt_of(length), 1))
        with watch(loaded.model) as seen:
            result = decode(decode_side, handoff.to_bytes())
            assert seen.tokens == []
        assert result.tokens == handoff.output == expected_tokens(loaded, length)[:1]
        assert_quiet(decode_side)


def test_a_handoff_that_nobody_acknowledges_lapses(loaded: LoadedModel) -> None:
    """Its reader may be dead. Whoever runs is renewed, however long that takes."""
    clock = FakeClock()
    with make_worker(loaded, WorkerOptions(lease_seconds=30.0), clock) as worker:
        hand_over(worker.engine, request_of("handed", prompt_of(50), NEW_TOKENS))
        worker.engine.submit(request_of("runs", prompt_of(50, seed=1), NEW_TOKENS))
        worker.engine.step()
        clock.advance(20.0)
        worker.engine.step()
        assert worker.store.leases == 2
        clock.advance(20.0)
        worker.engine.step()
        assert worker.store.leases == 1
        clock.advance(20.0)
        assert work_off(worker.engine)["runs"].tokens == expected_tokens(loaded, 50, seed=1)
        assert_quiet(worker)


def test_a_prefill_takes_room_for_its_prompt_alone(loaded: LoadedModel) -> None:
    """The answer grows elsewhere. Who finds no room waits for an acknowledgement, or for a lease to lapse."""
    clock = FakeClock()
    with make_worker(loaded, WorkerOptions(device_blocks=8), clock) as worker:
        engine = worker.engine
        for name, length in (("a", 60), ("b", 64)):
            hand_over(engine, request_of(name, prompt_of(length), 200))
        engine.submit_prefill(request_of("c", prompt_of(5), 200))
        engine.submit_prefill(request_of("d", prompt_of(60, seed=1), 200))
        assert (engine.step(), engine.waiting) == ([], 2)
        engine.acknowledge("a")
        assert [output.request_id for output in engine.step()] == ["c"]
        assert (engine.step(), engine.waiting) == ([], 1)
        clock.advance(31.0)
        # The others' leases are over.
        assert [output.request_id for output in engine.step()] == ["d"]
        engine.close()
        assert_quiet(worker)


def test_a_decode_side_without_room(loaded: LoadedModel) -> None:
    """The handoff waits, and nobody is told that it is held here before it is."""
    with (
        make_worker(loaded) as prefill_side,
        make_worker(loaded, WorkerOptions(device_blocks=8)) as decode_side,
    ):
        handoff = hand_over(prefill_side.engine, request_of("r", prompt_of(50), NEW_TOKENS))
        engine = decode_side.engine
        engine.submit(request_of("runs", prompt_of(60, seed=1), NEW_TOKENS))
        engine.step()
        engine.resume(handoff)
        while engine.running:
            assert not any(output.admitted for output in engine.step())
        assert work_off(engine)["r"].tokens == expected_tokens(loaded, 50)
        assert_quiet(decode_side)


# -- what cannot be handed over --------------------------------------------------------------------


@pytest.fixture(scope="module")
def handoff(loaded: LoadedModel) -> Handoff:
    with make_worker(loaded) as worker:
        return hand_over(worker.engine, request_of("r", prompt_of(34), NEW_TOKENS, extras=EXTRAS))


@pytest.fixture(scope="module")
def decode_side(loaded: LoadedModel) -> Iterator[Worker]:
    with make_worker(loaded) as worker:
        yield worker


def test_bytes_and_back(handoff: Handoff) -> None:
    assert Handoff.from_bytes(handoff.to_bytes()) == handoff
    assert handoff.extras == EXTRAS


@given(data=st.binary(max_size=200))
def test_garbage_is_no_handoff(data: bytes) -> None:
    for message in (data, xxhash.xxh3_64_digest(data) + data):
        with pytest.raises(HandoffError, match=f"{len(message)} bytes are no handoff"):
            Handoff.from_bytes(message)


@given(st.data())
def test_a_damaged_message_is_no_handoff(handoff: Handoff, data: st.DataObject) -> None:
    message = bytearray(handoff.to_bytes())
    at = data.draw(st.integers(0, len(message) - 1))
    if data.draw(st.booleans()):
        del message[at:]
    else:
        message[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(HandoffError, match="are no handoff"):
        Handoff.from_bytes(bytes(message))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("version", 1, "has version 1, expected 2; run the same release"),
        ("tokens", b"\0" * 5, "tokens are 5 bytes, not whole u32"),
        ("tokens", [1, 2], "tokens is a list, not a bytes"),
        ("output", [], "output has no first token"),
        ("output", [-1], "output has no first token"),
        ("extras", {"request_salt": b"", "items": [{"digest": b"short"}], "embeddings": []}, "no handoff"),
        ("max_new_tokens", "many", "max_new_tokens is a str"),
        ("sampling", {"temperature": 1.0}, "sampling at random has no seed"),
        ("sampling", {"temperature": -1.0}, "temperature is -1.0, expected 0"),
        ("sampling", {"temperature": "hot"}, "are no handoff"),
        ("sampling", {"heat": 1.0}, "unexpected keyword argument 'heat'"),
        ("sampling", {"temperature": 1.0, "seed": 0.5}, "top_k or seed is no whole number"),
        ("sampling", {"temperature": 1.0, "top_k": 2.5, "seed": 1}, "top_k or seed is no whole number"),
        ("stop_ids", ["\n"], "stop_ids are no token ids"),
        ("stop_ids", [5] * 257, "or more than 256"),
        ("request_id", "r" * 513, "request_id has more than 512 characters"),
        ("cached_tokens", 35, "cached_tokens is 35"),
        ("cached_tokens", -1, "cached_tokens is -1"),
        ("queue_seconds", float("nan"), "queue_seconds is nan"),
        ("execution_seconds", -1.0, "execution_seconds is -1.0"),
        ("ignore_eos", 1, "ignore_eos is a int"),
        ("unheard_of", 1, "unexpected keyword argument 'unheard_of'"),
    ],
)
def test_a_message_of_another_shape(handoff: Handoff, field: str, value: object, problem: str) -> None:
    """It is whole, and made by something else."""
    body = msgpack.packb({**msgpack.unpackb(handoff.to_bytes()[8:]), field: value})
    with pytest.raises(HandoffError) as caught:
        Handoff.from_bytes(xxhash.xxh3_64_digest(body) + body)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"namespace": b"\1" * 16}, HandoffError, "is of namespace 01010101"),
        ({"tail": b"short"}, HandoffError, "has a tail of 5 bytes, expected "),
        ({"tokens": bytes(4 * 34)}, HandoffError, "has hashes or output that no prompt has here"),
        ({"hashes": b""}, HandoffError, "has hashes or output that no prompt has here"),
        ({"extras": None}, HandoffError, "has hashes or output that no prompt has here"),
        ({"output": [10**6]}, HandoffError, "has hashes or output that no prompt has here"),
        ({"output": [5] * 25}, HandoffError, "has hashes or output that no prompt has here"),
        ({"max_new_tokens": 0}, PromptError, "max_new_tokens is 0"),
        ({"max_new_tokens": 2000}, PromptError, "expected at most"),
    ],
)
def test_a_handoff_that_does_not_fit_is_refused(
    decode_side: Worker, handoff: Handoff, changes: dict[str, object], kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind) as caught:
        decode_side.engine.resume(replace(handoff, **changes))  # type: ignore[arg-type]
    assert problem in str(caught.value)
    assert_quiet(decode_side)


def test_a_handoff_of_other_weights(
    loaded: LoadedModel, handoff: Handoff, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = load_tiny("llama", tmp_path_factory.mktemp("other"), seed=1)
    with make_worker(other) as worker:
        with pytest.raises(HandoffError, match="is of namespace"):
            worker.engine.resume(handoff)
        assert_quiet(worker)


def test_a_handoff_is_resumed_once_at_a_time(decode_side: Worker, handoff: Handoff) -> None:
    decode_side.engine.resume(handoff)
    with pytest.raises(RequestError, match="request id 'r' is in use"):
        decode_side.engine.resume(handoff)
    work_off(decode_side.engine)
    assert_quiet(decode_side)


def test_without_reuse_there_is_nothing_to_hand_over(decode_side: Worker) -> None:
    with pytest.raises(RequestError, match="has reuse=False, expected True"):
        hand_over(decode_side.engine, request_of("r", prompt_of(34), reuse=False))
    assert_quiet(decode_side)


def test_the_bytes_are_what_they_were() -> None:
    """Two releases of one version read each other: docs/wire-format.md, "Handoff"."""
    handoff = Handoff(
        "r",
        bytes(range(16)),
        bytes([1, 0, 0, 0, 2, 0, 0, 0]),
        b"",
        b"tail",
        [7],
        3,
        Extras(b"salt", (ContentItem(b"\x05" * 32, 1, 2),), (None,)),
        Sampling(0.5, 0.9, 4, 6),
        [2],
        ignore_eos=True,
        cached_tokens=1,
        queue_seconds=0.5,
        execution_seconds=0.25,
    )
    assert handoff.to_bytes().hex() == GOLDEN
    assert Handoff.from_bytes(bytes.fromhex(GOLDEN)) == handoff


GOLDEN = (
    "3e3ce8b2377c4211"  # xxh3_64 of what follows, big-endian
    "8fa776657273696f6e02aa726571756573745f6964a172a96e616d657370616365c410000102030405060708090a0b0c0d0e"
    "0fa6746f6b656e73c4080100000002000000a6686173686573c400a47461696cc4047461696ca66f75747075749107ae6d61"
    "785f6e65775f746f6b656e7303a665787472617383ac726571756573745f73616c74c40473616c74a56974656d739183a664"
    "6967657374c4200505050505050505050505050505050505050505050505050505050505050505a5737461727401a66c656e"
    "67746802aa656d62656464696e677391c0a873616d706c696e6784ab74656d7065726174757265cb3fe0000000000000a574"
    "6f705f70cb3feccccccccccccda5746f705f6b04a47365656406a873746f705f6964739102aa69676e6f72655f656f73c3ad"
    "6361636865645f746f6b656e7301ad71756575655f7365636f6e6473cb3fe0000000000000b1657865637574696f6e5f7365"
    "636f6e6473cb3fd0000000000000"
)
