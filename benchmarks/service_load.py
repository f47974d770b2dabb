"""How many look-ups a second does one server answer?

Several client processes, each with its share of the clients; a client is a connection that asks one
question after another. Ours and the empty handler take turns.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import grpc
from report import Report
from service_calls import LOOKUP, Question, by_tokens, draw_prompts, open_client, write_prompts
from service_processes import Metadata, Processes, Running, spec_of

CLIENTS = (1, 8, 64)
CLIENT_PROCESSES = 2
TOKENS = (2_048, 32_768)
PROMPTS = 16
SECONDS = 1.0
ROUNDS = 5
PAYLOAD_BYTES = 64


@dataclass(frozen=True)
class Load:
    """What one client process is told to do: that many clients, for that long."""

    address: str
    metadata: Metadata
    messages: list[bytes]
    clients: int
    seconds: float


class Rate(NamedTuple):
    """What a server did, and what each call cost it in time of any core."""

    calls_per_second: float
    cpu_ms: float


def measure_load(report: Report, processes: Processes) -> None:
    """Look-ups a second with some and with many clients, as a share of the empty handler's."""
    server, empty = processes.sidecar(pool_bytes="256MiB"), processes.empty()
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as opened:
        workers = []
        for _ in range(CLIENT_PROCESSES):
            end, other_end = spawn.Pipe()
            worker = spawn.Process(target=serve_loads, args=(other_end,), daemon=True)
            worker.start()
            opened.callback(worker.join)
            opened.callback(end.send, None)
            workers.append(end)
        client = opened.enter_context(open_client(server))
        namespace = client.namespace(spec_of("load", PAYLOAD_BYTES))
        for length in TOKENS:
            prompts = draw_prompts(PROMPTS, length, seed=length)
            write_prompts(namespace, prompts)
            processes.settle()
            questions = [by_tokens(namespace, tokens) for tokens in prompts]
            for clients in CLIENTS:
                case = f"{length:,} tokens, {clients} clients"
                ours, bare = _rates(workers[:clients], (server, empty), questions, clients)
                report.result(
                    part="load",
                    case=case,
                    calls_per_second=ours.calls_per_second,
                    floor_calls_per_second=bare.calls_per_second,
                    share=ours.calls_per_second / bare.calls_per_second,
                    server_cpu_ms=ours.cpu_ms,
                    floor_cpu_ms=bare.cpu_ms,
                )


def _rates(
    workers: list[Connection], servers: tuple[Running, Running], questions: list[Question], clients: int
) -> list[Rate]:
    messages = [question.message for question in questions]
    rates: list[list[Rate]] = [[], []]
    for _ in range(ROUNDS + 1):
        for server, found in zip(servers, rates, strict=True):
            before = cpu_seconds(server.process.pid)
            for place, worker in enumerate(workers):
                share = len(range(place, clients, len(workers)))
                worker.send(Load(server.address, server.metadata, messages, share, SECONDS))
            # Every load lasts as long as the others, but for the last call of each client.
            calls = sum(worker.recv() for worker in workers)
            used = cpu_seconds(server.process.pid) - before
            found.append(Rate(calls / SECONDS, used / calls * 1e3))
    return [
        Rate(
            statistics.median(rate.calls_per_second for rate in found[1:]),
            statistics.median(rate.cpu_ms for rate in found[1:]),
        )
        for found in rates
    ]


def cpu_seconds(pid: int) -> float:
    """What a process has used of all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve_loads(orders: Connection) -> None:
    """A client process: runs one load after the other, and answers how many calls it made."""
    while (load := orders.recv()) is not None:
        orders.send(asyncio.run(run_load(load)))


async def run_load(load: Load) -> int:
    """All clients of one process, each with a connection of its own; the calls that they made."""
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(_ask_on(load, number)) for number in range(load.clients)]
    return sum(client.result() for client in clients)


async def _ask_on(load: Load, number: int) -> int:
    async with grpc.aio.insecure_channel(
        load.address, options=(("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        lookup: Callable[..., Awaitable[bytes]] = channel.unary_unary(
            LOOKUP, request_serializer=None, response_deserializer=None
        )
        await lookup(load.messages[0], metadata=load.metadata, timeout=30.0)
        calls, ends_at = 0, time.perf_counter() + load.seconds
        while time.perf_counter() < ends_at:
            message = load.messages[(number + calls) % len(load.messages)]
            await lookup(message, metadata=load.metadata, timeout=30.0)
            calls += 1
        return calls
