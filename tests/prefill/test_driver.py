"""The engine's thread: what it tells the event loop, when a step raises, and when it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvstore.address import Address
from kvstore.errors import PoolError
from prefill.assemble import Worker
from prefill.config import Role
from prefill.engine import EngineOptions
from prefill.handoff import Handoff
from prefill.model import LoadedModel
from prefill.output import StepReport
from prefill.request import FinishReason, Request
from prefill.service.driver import Driver, DriverLimits, Wake
from prefill.service.errors import ServiceError, answer_to, retry_after_seconds
from prefill.service.front import Front, Part
from prefill.service.gate import Gate
from prefill.service.metrics import FrontMetrics
from prefill.service.rpc import PrefillService, RpcParts
from prefill.service.rpc_server import RpcServer
from prefill.service.stream import Stream
from tests.support.stores import FakeClock
from tests.support.valkey import ValkeyServer, shared_valkey
from tests.support.workers import (
    WorkerOptions,
    answer,
    assert_quiet,
    hand_over,
    load_tiny,
    make_worker,
    prompt_of,
    request_of,
)

__all__ = ["shared_valkey"]

LONG = 900
_T = TypeVar("_T")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("models"))


def drive(
    worker: Worker, play: Callable[[Driver], Awaitable[_T]], clock: Callable[[], float] = time.monotonic
) -> _T:
    """What ``play`` gives, on an event loop beside the worker's thread."""

    async def run() -> _T:
        driver = Driver(worker, Wake(), clock, DriverLimits(stream_tokens=2000, landing_seconds=5.0))
        driver.start()
        try:
            return await play(driver)
        finally:
            await driver.stop()

    return asyncio.run(run())


async def tokens_of(stream: Stream) -> list[int | None]:
    return [output.token async for output in stream]


def test_what_comes_of_a_request_that_is_gone_is_not_its_successors(loaded: LoadedModel) -> None:
    """The loop is busy while outputs come; then it ends the request, and begins one with the same id."""
    steps = threading.Semaphore(0)
    options = WorkerOptions(engine=EngineOptions(step_listeners=(lambda _: steps.release(),)))
    successor = request_of("same", prompt_of(50, seed=1))

    async def play(driver: Driver) -> list[int | None]:
        stream = await driver.submit(request_of("same", prompt_of(34), LONG))
        await anext(stream)
        while steps.acquire(blocking=False):
            pass
        assert all(steps.acquire(timeout=30) for _ in range(3))
        stream.close()
        return await tokens_of(await driver.submit(successor))

    with make_worker(loaded, options) as worker:
        told = drive(worker, play)
        assert told == answer(worker.engine, successor).tokens
        assert_quiet(worker)


@pytest.mark.redis
def test_a_handoff_that_nobody_waits_for_is_not_its_successors(
    loaded: LoadedModel, shared_valkey: ValkeyServer
) -> None:
    """Its blocks are still on their way to Redis when another prompt is asked for under the same id."""
    is_computed = threading.Event()

    def freeze(_report: StepReport) -> None:
        if not is_computed.is_set():
            shared_valkey.stop()
            is_computed.set()

    options = WorkerOptions(redis_url=shared_valkey.url, engine=EngineOptions(step_listeners=(freeze,)))
    given_up, wanted = (request_of("same", prompt_of(34, seed=seed)) for seed in (2, 3))

    async def play(driver: Driver) -> Handoff | None:
        stream = await driver.submit_prefill(given_up)
        try:
            assert await asyncio.to_thread(is_computed.wait, 30)
            await driver.ask(lambda: None)  # by then that step is over
            stream.close()
            stream = await driver.submit_prefill(wanted)
        finally:
            shared_valkey.resume()
        return (await anext(stream)).handoff

    with make_worker(loaded, options) as worker:
        handoff = drive(worker, play)
        assert handoff is not None
        assert handoff.answers(wanted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_ended(loaded: LoadedModel) -> None:
    async def play(driver: Driver) -> None:
        stream = await driver.submit(request_of("runs", prompt_of(34), LONG))
        await anext(stream)

        def end() -> None:
            raise SystemExit

        for question in (driver.ask(end), tokens_of(stream), driver.submit(request_of("new", prompt_of(5)))):
            with pytest.raises(ServiceError, match="thread has ended; start the worker again"):
                await asyncio.wait_for(question, 30)
        await asyncio.wait_for(driver.health_changed.wait(), 30)
        assert not driver.is_healthy()

    with make_worker(loaded) as worker:
        drive(worker, play)


class Defect:
    """A listener that raises while it is told to, as a defect anywhere in a step would."""

    def __init__(self) -> None:
        self.is_on = True

    def __call__(self, _report: StepReport) -> None:
        if self.is_on:
            raise RuntimeError("a defect")


async def served(driver: Driver) -> tuple[RpcServer, str]:
    """The driver's calls on a port, whose health follows it."""
    server = RpcServer()
    [address] = server.bind([Address(host="127.0.0.1", port=0)])
    gate = Gate(None, lambda _api, _outcome: None)
    parts = RpcParts(
        gate,
        driver,
        Front(driver, None, (), FrontMetrics(CollectorRegistry())),
        Role.BOTH,
        "tiny",
        stall_seconds=30.0,
    )
    await server.start(PrefillService(parts))
    return server, address


def test_health_is_red_for_a_while_after_a_step_that_raised(loaded: LoadedModel) -> None:
    """The requests of that step are ended, others are served, and health checks over gRPC hear of it."""
    clock, defect = FakeClock(), Defect()
    options = WorkerOptions(engine=EngineOptions(step_listeners=(defect,)))
    good = request_of("good", prompt_of(5))

    async def play(driver: Driver) -> tuple[list[int], list[int | None]]:
        server, address = await served(driver)
        following = asyncio.create_task(server.follow(driver.health_changed, driver.is_healthy))
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="prefill.v1.PrefillService"), timeout=60)
            seen = [(await watch.read()).status]
            with pytest.raises(RuntimeError, match="a defect"):
                await tokens_of(await driver.submit(Request("bad", prompt_of(34), LONG, 0.0)))
            seen.append((await watch.read()).status)
            defect.is_on = False
            tokens = await tokens_of(await driver.submit(good))
            clock.advance(5.0)
            seen.append((await watch.read()).status)
            watch.cancel()
        following.cancel()
        await server.stop(1.0)
        return seen, tokens

    with make_worker(loaded, options) as worker:
        seen, tokens = drive(worker, play, clock)
        states = health_pb2.HealthCheckResponse
        assert seen == [states.SERVING, states.NOT_SERVING, states.SERVING]
        assert tokens == answer(worker.engine, good).tokens
        assert_quiet(worker)


def test_memory_that_others_hold_may_be_free_later(loaded: LoadedModel) -> None:
    """Unlike a request that never fits, this one is worth sending again."""

    async def play(driver: Driver) -> list[int | None]:
        request = request_of("r", prompt_of(34))
        held = await driver.ask(lambda: worker.store.reserve(worker.spec.root.digest, 63))
        with pytest.raises(ServiceError, match="no room on the device") as raised:
            await tokens_of(await driver.submit(request))
        assert answer_to(raised.value).http is HTTPStatus.SERVICE_UNAVAILABLE
        assert answer_to(raised.value).rpc is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_seconds(raised.value) == 1.0
        with pytest.raises(PoolError, match="raise device_bytes") as never:
            await driver.submit(request_of("never", prompt_of(34), 1024 - 34))
        assert answer_to(never.value).http is HTTPStatus.BAD_REQUEST
        assert retry_after_seconds(never.value) is None
        await driver.ask(lambda: worker.store.unreserve(held))
        return await tokens_of(await driver.submit(request))

    with make_worker(loaded, WorkerOptions(device_blocks=63)) as worker:
        assert len(drive(worker, play)) == 6
        assert_quiet(worker)


class Prefilled:
    """A prompt that has been prefilled elsewhere, and whoever did that."""

    def __init__(self, handoff: Handoff) -> None:
        self.handoff = handoff
        self.is_acknowledged = False
        self.rejected = ""

    async def prefill(self, _request: Request) -> Prefilled:
        return self

    def acknowledge(self) -> None:
        self.is_acknowledged = True

    def reject(self, reason: str) -> None:
        self.rejected = reason


def test_a_first_token_that_ends_the_answer_comes_with_the_end(loaded: LoadedModel) -> None:
    """As where one worker does it all: readers leave the last token of such an answer out."""
    request, metrics = request_of("r", prompt_of(34)), FrontMetrics(CollectorRegistry())
    with make_worker(loaded) as worker:
        handed = Prefilled(hand_over(worker.engine, request))
    first = handed.handoff.output[0]
    ends = replace(loaded, spec=replace(loaded.spec, eos_ids=(first,)))

    async def play(driver: Driver) -> list[list[Part]]:
        answers = []
        for prefillers in (None, handed):
            front = Front(driver, prefillers, (first,), metrics)
            async with front.generate(request) as answer:
                answers.append([part async for part in answer])
        return answers

    with make_worker(ends) as worker:
        here, elsewhere = drive(worker, play)
        assert_quiet(worker)
    for parts in (here, elsewhere):
        assert [(part.tokens, part.finished) for part in parts] == [([first], FinishReason.STOP)]
    assert handed.is_acknowledged
    assert not handed.rejected


def test_a_handoff_of_another_model_is_counted_and_prefilled_here(loaded: LoadedModel) -> None:
    request, registry = request_of("r", prompt_of(34)), CollectorRegistry()
    with make_worker(loaded) as worker:
        expected = answer(worker.engine, request).tokens
        handoff = hand_over(worker.engine, request)
    handed = Prefilled(replace(handoff, namespace=bytes(16)))

    async def play(driver: Driver) -> list[int]:
        async with Front(driver, handed, (), FrontMetrics(registry)).generate(request) as parts:
            return [token async for part in parts for token in part.tokens]

    with make_worker(loaded) as worker:
        assert drive(worker, play) == expected
        assert_quiet(worker)
    assert "run the same model" in handed.rejected
    assert handed.is_acknowledged
    assert registry.get_sample_value("prefill_fallbacks_total", {"cause": "rejected"}) == 1
    assert registry.get_sample_value("prefill_front_ttft_seconds_count", {"prefilled": "here"}) == 1
