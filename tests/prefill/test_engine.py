"""Requests beside each other: shared prefixes, too little memory, and what they leave in the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hashing import Root
from kvstore.block import WHOLE, MissCause, TierName
from kvstore.config import Config
from kvstore.events import RequestSettled
from kvstore.spec import NamespaceSpec, slot_bytes_for
from kvstore.tiers.base import Tier
from prefill.assemble import namespace_of
from prefill.engine import Engine, EngineOptions
from prefill.model import LoadedModel
from prefill.output import StepReport
from prefill.paged import KVMemory
from prefill.request import Request, Result
from prefill.runner import Runner
from tests.support.dict_tier import DictTier
from tests.support.faulty_tier import HeldTier
from tests.support.stores import FakeClock, Recorder, Rig, RigOptions, make_rig
from tests.support.workers import (
    BLOCK_SIZE,
    Tokens,
    WorkerOptions,
    answer,
    assert_quiet,
    device_of,
    empty,
    load_tiny,
    make_worker,
    one_thread,
    prompt_of,
    ready_blocks,
    request_of,
    resident,
    results_of,
    watch,
    work_off,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("models"))


def conversations() -> list[Tokens]:
    """Six prompts on two documents: some the same, some with a common head, of many lengths."""
    first, second = prompt_of(80, seed=1), prompt_of(64, seed=2)
    return [
        np.concatenate([first, prompt_of(7, seed=3)]),
        np.concatenate([first, prompt_of(40, seed=4)]),
        second,
        first,
        np.concatenate([second, prompt_of(33, seed=5)]),
        np.concatenate([first, prompt_of(7, seed=3)]),
    ]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[list[int]]:
    """What each conversation gives when it has the engine, and no cache, to itself."""
    with make_worker(loaded) as worker:
        requests = [request_of(str(at), each, 20, reuse=False) for at, each in enumerate(conversations())]
        return [answer(worker.engine, request).tokens for request in requests]


def requests_of(prompts: list[Tokens], new: int = 20) -> list[Request]:
    return [request_of(f"r{at}", prompt, new) for at, prompt in enumerate(prompts)]


# 9 blocks are what the longest takes: there each one waits for the one before it.
@pytest.mark.parametrize("device_blocks", [9, 14, 20, 64])
def test_requests_side_by_side_answer_as_they_do_alone(
    loaded: LoadedModel, alone: list[list[int]], device_blocks: int
) -> None:
    recorder = Recorder()
    options = WorkerOptions(device_blocks=device_blocks, listeners=(recorder,))
    with make_worker(loaded, options) as worker:
        results = []
        for _ in range(2):
            results += worker.engine.run(requests_of(conversations()))
            assert_quiet(worker)
    assert [result.tokens for result in results] == alone * 2
    settled = recorder.of(RequestSettled)
    assert sorted(event.asked_tokens for event in settled) == sorted(len(p) for p in conversations() * 2)
    hits = [sum(event.hit_tokens.values()) for event in settled]
    assert sum(hits) == sum(result.cached_tokens for result in results) > 0


def test_a_request_that_loses_its_memory_goes_on(loaded: LoadedModel) -> None:
    """There is room for both prompts, and not for both answers. Each is counted once, and queues once."""
    clock, recorder, reports = FakeClock(), Recorder(), list[StepReport]()
    scheduling = EngineOptions(step_listeners=(reports.append,))
    options = WorkerOptions(device_blocks=9, listeners=(recorder,), engine=scheduling)
    with make_worker(loaded, options, clock) as worker:
        engine, prompt = worker.engine, prompt_of(100)
        engine.submit(*(Request(name, prompt, 20, clock()) for name in ("first", "second")))
        results: dict[str, Result] = {}
        while not engine.idle:
            clock.advance(1.0)
            results.update(results_of(engine.step()))
        assert_quiet(worker)
    first, second = results["first"], results["second"]
    assert (second.tokens, second.cached) == (first.tokens, {TierName.DEVICE: 96})
    assert (first.queue_seconds, second.queue_seconds) == (1.0, 2.0)
    assert sum(report.preempted for report in reports) == 1
    # It was at the edge of a block, and all that it had computed is in the cache.
    assert second.recomputed_tokens == 0
    assert second.inter_token_seconds[:11] == [1.0] * 11
    assert len(recorder.of(RequestSettled)) == 2


@pytest.mark.parametrize("device_blocks", [9, 12, 16])
def test_blocks_of_a_request_that_waits_come_up_when_there_is_room(
    loaded: LoadedModel, device_blocks: int
) -> None:
    """They are below while others fill the device, and are not computed again for that."""
    with make_worker(loaded, WorkerOptions(device_blocks=device_blocks)) as worker:
        expected = answer(worker.engine, request_of("filler", prompt_of(100), 20)).tokens
        empty(device_of(worker))
        worker.engine.submit(
            request_of("first", prompt_of(100, seed=1), 20), request_of("second", prompt_of(100), 20)
        )
        second = work_off(worker.engine)["second"]
        assert (second.cached, second.tokens) == ({TierName.HOST: 96}, expected)
        assert_quiet(worker)


def test_two_identical_prompts_at_once_share_their_blocks(loaded: LoadedModel) -> None:
    """Whoever computes a block second keeps its copy to itself, works with it and gives it back."""
    prompt = prompt_of(48)
    with make_worker(loaded) as worker:
        expected = answer(worker.engine, request_of("alone", prompt, 20, reuse=False)).tokens
        assert ready_blocks(device_of(worker)) == 0
        first, second = worker.engine.run(requests_of([prompt, prompt]))
        assert first.tokens == second.tokens == expected
        assert (first.cached, second.cached) == ({}, {TierName.DEVICE: 32})
        whole = (len(prompt) + 19) // BLOCK_SIZE
        assert ready_blocks(device_of(worker)) == whole
        assert_quiet(worker)
        grown = np.concatenate([prompt, np.array(expected, dtype=np.uint32)])
        assert resident(worker, grown)[TierName.DEVICE] == whole


def test_an_answer_is_cached_too(loaded: LoadedModel) -> None:
    with make_worker(loaded) as worker:
        prompt = prompt_of(40)
        said = answer(worker.engine, request_of("turn 1", prompt, 30)).tokens
        dialogue = np.concatenate([prompt, np.array(said, dtype=np.uint32), prompt_of(5, seed=9)])
        result = answer(worker.engine, request_of("turn 2", dialogue))
        # The last token said has no KV yet: it was never put into the model.
        assert result.cached == {TierName.DEVICE: (len(prompt) + 29) // BLOCK_SIZE * BLOCK_SIZE}


def test_without_reuse_nothing_is_taken_or_left(loaded: LoadedModel) -> None:
    with make_worker(loaded) as worker:
        answer(worker.engine, request_of("stored", prompt_of(48)))
        with watch(loaded.model) as seen:
            result = answer(worker.engine, request_of("asked", prompt_of(48), 6, reuse=False))
            assert (result.cached, result.computed_tokens, seen.tokens) == ({}, 48, [48, 1, 1, 1, 1, 1])
            answer(worker.engine, request_of("other", prompt_of(48, seed=1), 6, reuse=False))
        assert resident(worker, prompt_of(48, seed=1))[TierName.DEVICE] == 0
        assert_quiet(worker)


def test_an_end_token_ends_an_answer(loaded: LoadedModel) -> None:
    with make_worker(loaded) as worker:
        tokens = answer(worker.engine, request_of("free", prompt_of(34), 8)).tokens
    ends = replace(loaded, spec=replace(loaded.spec, eos_ids=(tokens[2],)))
    with make_worker(ends) as worker:
        stop = tokens.index(tokens[2]) + 1
        assert answer(worker.engine, request_of("ended", prompt_of(34), 8)).tokens == tokens[:stop]
        assert_quiet(worker)


def test_a_step_without_work_does_nothing(loaded: LoadedModel) -> None:
    with make_worker(loaded) as worker:
        assert worker.engine.step() == []
        assert worker.engine.run([]) == []


REDIS_SECONDS = 0.3


def engine_over(
    rig: Rig, loaded: LoadedModel, root: Root, clock: Callable[[], float] = time.monotonic
) -> Engine:
    """An engine that hardly waits for redis."""
    assert rig.device is not None
    memory = KVMemory(rig.device.tensor, loaded.spec, BLOCK_SIZE)
    options = EngineOptions(redis_seconds=REDIS_SECONDS)
    return Engine(Runner(loaded.model, memory), memory, rig.store, root, clock=clock, options=options)


def test_blocks_that_come_too_late_are_no_hits(loaded: LoadedModel) -> None:
    """Redis delivers when the engine has given up waiting, and has computed what it waited for."""
    spec = NamespaceSpec(namespace_of(loaded.spec, Config(block_size=BLOCK_SIZE)))
    redis, request = DictTier(), request_of("r", prompt_of(100))
    with one_thread(), make_rig(time.monotonic, [(spec, (WHOLE,))], rig_options(redis)) as rig:
        expected = answer(engine_over(rig, loaded, spec.root), request).tokens
        rig.settle()
    held = HeldTier(redis)
    with one_thread(), make_rig(time.monotonic, [(spec, (WHOLE,))], rig_options(held)) as rig:
        engine = engine_over(rig, loaded, spec.root)
        engine.submit(request)
        probe = threading.Thread(target=held.let_one_through)
        probe.start()
        while not engine.running:
            engine.step()
        probe.join()
        held.open()
        rig.settle()
        assert held.calls["load"] == 1, "redis had nothing to deliver"
        result = work_off(engine)["r"]
        rig.settle()
        rig.store.check()
        [event] = rig.events.of(RequestSettled)
    assert (result.tokens, result.cached, result.computed_tokens) == (expected, {}, 100)
    assert event.hit_tokens == {}
    assert sum(event.miss_tokens.values()) == event.asked_tokens == 100


def test_a_stalled_redis_holds_up_nobody_who_decodes(loaded: LoadedModel) -> None:
    """Who waits for redis waits alone; and when the time is up, without redis."""
    spec = NamespaceSpec(namespace_of(loaded.spec, Config(block_size=BLOCK_SIZE)))
    clock, held = FakeClock(), HeldTier(DictTier())
    with one_thread(), make_rig(clock, [(spec, (WHOLE,))], rig_options(held)) as rig:
        engine = engine_over(rig, loaded, spec.root, clock)
        running = request_of("running", prompt_of(9, seed=1), new=30)
        engine.submit(running)
        engine.step()  # too short for a block: redis is not asked
        engine.submit(request_of("waiting", prompt_of(100), new=1))
        for _ in range(5):
            assert [output.request_id for output in engine.step()] == ["running"]
        assert held.calls == {"match": 1}, "the other is still being looked up"
        clock.advance(REDIS_SECONDS + 1)
        waited = results_of(engine.step())["waiting"]
        assert (waited.cached, waited.computed_tokens) == ({}, 100)
        assert len(work_off(engine)["running"].tokens) == 30
        held.open()
        rig.settle()
        rig.store.check()
        [event] = [each for each in rig.events.of(RequestSettled) if each.asked_tokens == 100]
    assert event.miss_tokens == {MissCause.TIMEOUT: 96, MissCause.TAIL: 4}


def test_who_waits_for_redis_waits_alone(loaded: LoadedModel) -> None:
    """Those behind it get in; a cold prompt that begins as it does joins its question to redis."""
    spec = NamespaceSpec(namespace_of(loaded.spec, Config(block_size=BLOCK_SIZE)))
    clock, held = FakeClock(), HeldTier(DictTier())
    with one_thread(), make_rig(clock, [(spec, (WHOLE,))], rig_options(held)) as rig:
        engine = engine_over(rig, loaded, spec.root, clock)
        engine.submit(
            request_of("first", prompt_of(100), 1),
            request_of("like it", np.concatenate([prompt_of(100), prompt_of(9, seed=1)]), 1),
            request_of("short", prompt_of(9, seed=2), 1),
        )
        assert list(results_of(engine.step())) == ["short"]
        assert engine.waiting == 2
        held.open()
        results = work_off(engine)
        assert results["first"].computed_tokens == 100
        assert results["like it"].computed_tokens == 109 - 96
        rig.settle()
        rig.store.check()
        assert rig.store.leases == 0


def test_two_that_wait_for_redis_do_not_hold_each_others_room(loaded: LoadedModel) -> None:
    """Each leases nearly half of the device and needs more than is left: one gives way, and comes back."""
    spec = NamespaceSpec(namespace_of(loaded.spec, Config(block_size=BLOCK_SIZE)))
    heads = [prompt_of(65, seed=seed) for seed in range(2)]
    longer = [request_of(f"r{seed}", np.concatenate([heads[seed], prompt_of(31)]), 6) for seed in range(2)]
    with make_worker(loaded) as worker:
        expected = {each.request_id: answer(worker.engine, each).tokens for each in longer}
    clock, held = FakeClock(), HeldTier(DictTier())
    room = 9 * slot_bytes_for(loaded.spec.block_bytes(BLOCK_SIZE))
    options = replace(rig_options(held), device_extent_bytes=room)
    with one_thread(), make_rig(clock, [(spec, (WHOLE,))], options) as rig:
        engine = engine_over(rig, loaded, spec.root, clock)
        engine.submit(*(request_of(f"head {seed}", head, 1) for seed, head in enumerate(heads)))
        while not engine.idle:
            engine.step()
            clock.advance(REDIS_SECONDS)  # redis is silent
        engine.submit(*longer)
        assert engine.step() == []
        assert rig.store.usage()[TierName.DEVICE].leased == 8 * room // 9
        held.open()
        assert {name: result.tokens for name, result in work_off(engine).items()} == expected
        rig.settle()
        rig.store.check()
        assert rig.store.leases == 0
        # Whoever gave way asked twice, and counts once.
        assert len([event for event in rig.events.of(RequestSettled) if event.asked_tokens == 96]) == 2


def rig_options(redis: Tier) -> RigOptions:
    return RigOptions(device_extents=1, extent_bytes=4 << 20, redis=redis)
