"""Workloads that policies are compared on, made from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.random import Generator

from hashing import Root
from kvstore.block import Chain
from kvstore.hints import Hints
from kvstore.simulate import Workload
from kvstore.trace import Request

Timed = tuple[float, list[int]]
_ROOT = Root(digest=bytes(16), block_size=1, algorithm="xxh3_128")
_SECONDS_BETWEEN = 0.3


def workload_of(timed: Iterable[Timed]) -> Workload:
    """Prompts of one-token blocks, in order of time."""
    prompts = sorted(timed, key=lambda prompt: prompt[0])
    return Workload.of(
        [Request(time, Chain.of(_ROOT, np.array(ids, dtype=np.uint32)), len(ids), 1) for time, ids in prompts]
    )


class Names:
    """Fresh runs of block ids."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def documents(random: Generator, requests: int = 5000) -> Iterator[Timed]:
    """The same prompts again and again, by a Zipf law that does not change."""
    names = Names()
    prompts = [names.take(int(random.integers(4, 60))) for _ in range(1500)]
    weights = 1 / np.arange(1, len(prompts) + 1) ** 0.9
    picks = random.choice(len(prompts), requests, p=weights / weights.sum())
    for number, pick in enumerate(picks.tolist()):
        yield number * _SECONDS_BETWEEN, prompts[pick]


def few_shot(random: Generator, requests: int = 2000) -> Iterator[Timed]:
    """Some long instructions, each with many short questions."""
    names = Names()
    instructions = [names.take(10 + number % 30) for number in range(200)]
    for number in range(requests):
        chosen = instructions[min(int(random.zipf(1.5)), len(instructions)) - 1]
        yield number * _SECONDS_BETWEEN, chosen + names.take(int(random.integers(1, 8)))


def sessions(random: Generator, count: int = 1200, think: float = 60.0) -> Iterator[Timed]:
    """Conversations that grow turn by turn, with times to think."""
    names = Names()
    systems = [names.take(4) for _ in range(3)]
    for number in range(count):
        time, prompt = random.uniform(0, 1800), systems[number % 3]
        for _ in range(int(random.geometric(0.3))):
            prompt = prompt + names.take(int(random.integers(2, 20)))
            yield time, prompt
            time += random.lognormal(np.log(think), 1)


def agents(random: Generator, count: int = 300) -> Iterator[Timed]:
    """Loops of tool calls: one prompt grows in small steps, soon after each other."""
    names = Names()
    tools = [names.take(20) for _ in range(5)]
    for number in range(count):
        time, prompt = random.uniform(0, 1800), tools[number % 5]
        for _ in range(int(random.integers(3, 25))):
            prompt = prompt + names.take(int(random.integers(1, 6)))
            yield time, prompt
            time += random.exponential(4)


def scans(random: Generator, requests: int = 2000) -> Iterator[Timed]:
    """Prompts that are asked once, between questions about documents that stay."""
    names = Names()
    kept = [names.take(15) for _ in range(150)]
    for number in range(requests):
        if random.random() < 0.6:
            yield number * _SECONDS_BETWEEN, names.take(int(random.integers(10, 60)))
        else:
            yield number * _SECONDS_BETWEEN, kept[int(random.integers(len(kept)))] + names.take(2)


GENERATED: dict[str, Callable[[Generator], Iterator[Timed]]] = {
    "documents": documents,
    "few shot": few_shot,
    "sessions": sessions,
    "agents": agents,
    "scans": scans,
}


def with_ends(workload: Workload) -> Workload:
    """Every request says ``ended`` when nobody will use more than half of its prompt again."""
    used_last = np.zeros(workload.distinct_blocks, dtype=np.int64)
    for number, ids in enumerate(workload.blocks):
        used_last[ids] = number
    requests = [
        Request(
            request.time,
            request.chain,
            request.tokens,
            request.block_tokens,
            Hints(ended=bool(used_last[ids[len(ids) // 2]] == number)),
        )
        for number, (request, ids) in enumerate(zip(workload.requests, workload.blocks, strict=True))
    ]
    return replace(workload, requests=requests)
