"""What ``redis_tier.py`` moves: blocks of one size, by the tier and by those that it is compared with."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from redis_bare import BareSocket
from report import Report

from hashing import KVShape, Namespace
from kvstore.block import WHOLE, BlockRows, Chain
from kvstore.tiers.base import Payload, SaveOutcome
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_value import Headers, block_key

BLOCK_SIZE = 16
KIB = 1024
AHEAD_OF_REDIS_PY = 2.0
_PATIENCE_SECONDS = 60.0
_NAMESPACE = Namespace("benchmark", "0", "uint8", "none", BLOCK_SIZE, KVShape(1, 2, 1, 1))


def rows_of(blocks: int, seed: int = 0) -> BlockRows:
    """One prompt; two seeds share no block."""
    tokens = np.random.default_rng([seed, blocks]).integers(0, 2**17, blocks * BLOCK_SIZE)
    return Chain.of(_NAMESPACE.root(), tokens.astype(np.uint32)).rows(WHOLE)


def keys_of(rows: BlockRows) -> list[bytes]:
    return [block_key("kv", rows, block) for block in range(len(rows))]


def soon() -> float:
    """A deadline that nothing here reaches."""
    return time.monotonic() + _PATIENCE_SECONDS


def raced(contenders: Mapping[str, Callable[[], float | None]], rounds: int) -> dict[str, float]:
    """Median seconds of contenders that take turns; one that returns seconds has taken them itself.

    Every other round goes backwards: who comes after another finds that one's memory in the caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in list(contenders.items())[:: -1 if number % 2 else 1]:
            started = time.perf_counter()
            own = run()
            seconds[name].append(time.perf_counter() - started if own is None else own)
    return {name: statistics.median(samples[1:]) for name, samples in seconds.items()}


class LMCache:
    """LMCache's own client in a process of its own: it says how long it took."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        ready = self._line()
        assert ready == "ready", f"LMCache's client answered {ready!r}"

    @classmethod
    @contextmanager
    def run(cls, python: str, port: int) -> Iterator[LMCache]:
        """Beside the block of code."""
        script = Path(__file__).with_name("redis_lmcache.py")
        with subprocess.Popen(
            [python, str(script), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            yield cls(process)
            process.communicate("\n")

    def ask(self, command: str, size: int, blocks: int) -> float:
        """Seconds for so many values; ``set`` them before ``get``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {size} {blocks}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class Contest:
    """The same blocks for every contender. ``bare`` are its sockets, each with the blocks that it has.

    redis-py has two goes: as it is, with values that are ``bytes``; and "into slots", where it does what
    the others do, which is to take payloads out of host memory and to put them there.
    """

    tier: RedisTier
    bare: Sequence[tuple[BareSocket, Sequence[int]]]
    client: Any
    """Of redis-py."""
    rows: BlockRows
    size: int
    lmcache: LMCache | None = None
    payloads: list[Payload] = field(init=False)
    destinations: list[Payload] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.size)
        self.payloads = [random.integers(0, 256, self.size, dtype=np.uint8) for _ in range(len(self.rows))]
        self.destinations = [np.zeros_like(payload) for payload in self.payloads]
        self._sums = [xxhash.xxh3_64_intdigest(payload.data) for payload in self.payloads]
        self._keys = keys_of(self.rows)
        headers = Headers(self.rows)
        self._headers = [
            headers.header(block, self.size, checksum) for block, checksum in enumerate(self._sums)
        ]
        pairs = zip(self._headers, self.payloads, strict=True)
        self._values = [header + payload.tobytes() for header, payload in pairs]

    @property
    def contenders(self) -> dict[str, dict[str, Callable[[], float | None]]]:
        """By command, who runs it."""
        both: dict[str, dict[str, Callable[[], float | None]]] = {
            "SET": {"tier": self._save, "bare": self._bare_set},
            "GET": {"tier": self._load, "bare": self._bare_get},
        }
        if self.client is not None:
            both["SET"] |= {"redis-py": self._pipelined_set, "redis-py slots": self._pipelined_set_from_slots}
            both["GET"] |= {"redis-py": self._mget, "redis-py slots": self._mget_into_slots}
        if self.lmcache is not None:
            both["SET"]["lmcache"] = partial(self.lmcache.ask, "set", self.size, len(self.rows))
            both["GET"]["lmcache"] = partial(self.lmcache.ask, "get", self.size, len(self.rows))
        return both

    def check(self) -> None:
        """What arrived last is what was sent."""
        for mine, theirs in zip(self.destinations, self.payloads, strict=True):
            assert np.array_equal(mine, theirs)

    def _save(self) -> None:
        outcomes = self.tier.save(self.rows, self.payloads, self._sums, soon())
        assert set(outcomes) == {SaveOutcome.STORED}, outcomes

    def _load(self) -> None:
        result = self.tier.load(self.rows, self.destinations, soon())
        assert result.checksums == self._sums, result.causes

    def _bare_set(self) -> None:
        for bare, blocks in self.bare:
            bare.set(
                [self._keys[i] for i in blocks],
                [self._headers[i] for i in blocks],
                [self.payloads[i] for i in blocks],
            )

    def _bare_get(self) -> None:
        for bare, blocks in self.bare:
            keys, destinations = [self._keys[i] for i in blocks], [self.destinations[i] for i in blocks]
            bare.get(keys, len(self._headers[0]), destinations)

    def _pipelined_set(self, values: Sequence[bytes] | None = None) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for key, value in zip(self._keys, values or self._values, strict=True):
                pipeline.set(key, value, px=86_400_000)
            pipeline.execute()

    def _pipelined_set_from_slots(self) -> None:
        pairs = zip(self._headers, self.payloads, strict=True)
        self._pipelined_set([b"".join((header, payload.data)) for header, payload in pairs])

    def _mget(self) -> None:
        self._values_now()

    def _mget_into_slots(self) -> None:
        skipped = len(self._headers[0])
        for value, destination in zip(self._values_now(), self.destinations, strict=True):
            destination[:] = np.frombuffer(value, dtype=np.uint8, offset=skipped)

    def _values_now(self) -> list[bytes]:
        # Of a cluster's client, the one that may ask several nodes.
        mget = getattr(self.client, "mget_nonatomic", self.client.mget)
        values: list[bytes] = mget(self._keys)
        assert all(len(value) == len(self._values[0]) for value in values)
        return values


def measure_contest(report: Report, contest: Contest, place: str, rounds: int, at_least: float) -> None:
    """Both ways: speeds, and the tier's goals against whoever takes part."""
    gigabytes = len(contest.rows) * contest.size / 1e9
    for command, contenders in contest.contenders.items():
        medians = raced(contenders, rounds)
        case = f"{command} {contest.size // KIB} KiB, {place}"
        share = medians["bare"] / medians["tier"]
        ahead = medians["redis-py"] / medians["tier"]
        peer = medians.get("lmcache")
        report.result(
            case=case,
            gb_per_second=gigabytes / medians["tier"],
            bare_gb_per_second=gigabytes / medians["bare"],
            share_of_bare=share,
            times_redis_py=ahead,
            bare_times_redis_py=medians["redis-py"] / medians["bare"],
            times_redis_py_slots=medians["redis-py slots"] / medians["tier"],
            times_lmcache=peer and peer / medians["tier"],
        )
        report.goal(f"{case}: share of a bare socket's speed", share, at_least=at_least)
        report.goal(f"{case}: times redis-py's speed", ahead, at_least=AHEAD_OF_REDIS_PY)
        if peer is not None:
            report.goal(f"{case}: times the speed of LMCache's client", peer / medians["tier"], at_least=1.0)
    contest.check()
