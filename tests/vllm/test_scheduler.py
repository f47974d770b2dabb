"""The scheduler's side against a sidecar, without an engine: what is asked, saved and said."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvstore.connectors.vllm.groups import NULL_BLOCK, CacheGroups
from kvstore.connectors.vllm.known import KnownBlocks
from kvstore.connectors.vllm.lookups import Lookups, Pending, Question
from kvstore.connectors.vllm.messages import Progress
from kvstore.connectors.vllm.scheduler import Policy, SchedulerSide
from kvstore.connectors.vllm.tally import Tally
from kvstore.hints import NO_HINTS, Hints
from kvstore.service.client import Client
from tests.support.sidecars import Sidecar, sidecar
from tests.vllm.prompts import tokens
from tests.vllm.stored import await_idle
from tests.vllm.test_identity import BASE
from tests.vllm.test_saves import Pool

SPEC = BASE.spec()
SIZE = SPEC.block_size
PROMPT = tokens(1, 12 * SIZE + 3)


class Request:
    """vLLM's request, as far as the scheduler's side reads it."""

    def __init__(self, prompt: list[int], params: dict[str, Any] | None = None, name: str = "r") -> None:
        self.request_id = name
        self.all_token_ids: Sequence[int] = prompt
        self.num_tokens = self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        # A name for each prefix of whole blocks.
        ends = range(SIZE, len(prompt) + 1, SIZE)
        self.block_hashes: Sequence[bytes] = [repr(prompt[:end]).encode() for end in ends]
        self.kv_transfer_params: Mapping[str, Any] | None = params
        self.skip_reading_prefix_cache = False
        self.cache_salt: str | None = None
        self.lora_request: Any = None
        self.mm_features: Sequence[Any] = ()
        self.prompt_embeds: Any = None
        self.resumable = False


@dataclass
class Noted(Lookups):
    """The real thing, which also remembers what it was asked."""

    client: Client
    questions: list[Question] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.client, (1, 1), 0.0, time.perf_counter)

    def ask(self, question: Question) -> Pending:
        self.questions.append(question)
        return super().ask(question)


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    """Has the first ten blocks of the prompt."""
    with sidecar(pool_bytes="64MiB") as started:
        with Client(started.address) as client:
            with client.namespace(SPEC).write(PROMPT[: 10 * SIZE]) as write:
                write.copy_in([np.full(len(each), 7, np.uint8) for each in write.payloads])
            assert write.committed_blocks == 10
        yield started


@pytest.fixture
def sides(server: Sidecar) -> Iterator[tuple[SchedulerSide, Noted, Pool]]:
    lookups, pool = Noted(Client(server.address)), Pool()
    side = side_of(CacheGroups(SIZE, (("layer",),)), lookups, pool)
    yield side, lookups, pool
    side.close()
    await_idle(server)


def side_of(groups: CacheGroups, lookups: Noted, pool: Pool) -> SchedulerSide:
    policy = Policy(SPEC, groups, 1, loads=True, saves=True, asynchronous=True, lookup_seconds=10.0)
    side = SchedulerSide(policy, lookups, Tally(), time.perf_counter, lambda: "mark")
    side.saves.bind(pool)
    return side


def matched(side: SchedulerSide, request: Request, local_blocks: int) -> int:
    """Tokens to load, in blocks, however often the answer is to ask later."""
    deadline = time.monotonic() + 10
    while (found := side.matched_tokens(request, local_blocks * SIZE)[0]) is None:
        assert time.monotonic() < deadline, "there was no answer in time"
        side.orders([], lambda request_id: [])
    return found // SIZE


def computed(side: SchedulerSide, request: Request, blocks: int) -> list[Any]:
    """The saves that a step orders which computes the rest of the prompt."""
    request.num_computed_tokens = blocks * SIZE
    rest = request.num_tokens - request.num_computed_tokens
    return side.orders([(request.request_id, rest)], lambda request_id: list(range(1, 14))).saves


def finish(side: SchedulerSide, jobs: list[Any], *, stored: bool) -> None:
    for job in jobs:
        progress = Progress()
        progress.ended[job.job_id] = 1
        progress.stored[job.job_id] = int(stored)
        side.progressed(progress, set())


def test_only_what_the_engine_lacks_is_asked_for(sides: tuple[SchedulerSide, Noted, Pool]) -> None:
    """Blocks that it has are no question, no lease and no count (case 48)."""
    side, lookups, _ = sides
    request = Request(PROMPT)
    side.new_request(request)
    assert matched(side, request, 4) == 6
    assert [question.first_block for question in lookups.questions] == [4]
    side.allocated(request, list(range(1, 13)), 6 * SIZE)
    [job] = side.orders([], lambda request_id: []).loads
    assert job.block_ids == [5, 6, 7, 8, 9, 10]
    assert job.ticket is not None
    assert (job.ticket.first_block, job.ticket.blocks) == (0, 6)
    assert side.hit_tiers("r", 6 * SIZE) == {"host": 6 * SIZE}
    progress = Progress()
    progress.load_over("r", 6)
    side.progressed(progress, set())
    side.finished(request, [])


def test_an_engine_that_lost_blocks_meanwhile_asks_again(sides: tuple[SchedulerSide, Noted, Pool]) -> None:
    """A lease from block 4 on is of no use to who has three."""
    side, lookups, _ = sides
    request = Request(PROMPT)
    side.new_request(request)
    assert matched(side, request, 4) == 6
    assert matched(side, request, 3) == 7
    assert matched(side, request, 5) == 5, "more than it had is no reason to ask"
    assert [question.first_block for question in lookups.questions] == [4, 3]
    side.finished(request, [])


def test_all_that_it_has_is_not_asked_for(sides: tuple[SchedulerSide, Noted, Pool]) -> None:
    side, lookups, _ = sides
    request = Request(PROMPT)
    side.new_request(request)
    assert matched(side, request, 12) == 0
    assert not lookups.questions
    side.finished(request, [])


def test_what_the_engine_has_and_never_saved_is_saved(sides: tuple[SchedulerSide, Noted, Pool]) -> None:
    """Else what follows it would be stored where nobody finds it."""
    side, _, _ = sides
    fresh = tokens(2, 12 * SIZE + 3)
    first, second, third = (Request(fresh, name=name) for name in "abc")
    side.new_request(first)
    assert matched(side, first, 0) == 0
    [job] = computed(side, first, 0)
    assert job.first_block == 0
    finish(side, [job], stored=False)  # as when the sidecar had no room
    side.new_request(second)
    assert matched(side, second, 8) == 0
    [job] = computed(side, second, 8)
    assert job.first_block == 0
    finish(side, [job], stored=True)
    side.new_request(third)
    assert matched(side, third, 8) == 0
    [job] = computed(side, third, 8)
    assert job.first_block == 8
    finish(side, [job], stored=True)
    for request in (first, second, third):
        side.finished(request, [])


def test_what_was_saved_under_old_weights_is_not_known_under_new_ones(
    sides: tuple[SchedulerSide, Noted, Pool],
) -> None:
    """A save of before the reset that ends after it says nothing of the namespace of now."""
    side, _, _ = sides
    fresh = tokens(3, 12 * SIZE + 3)
    first, second = (Request(fresh, name=name) for name in "ab")
    side.new_request(first)
    assert matched(side, first, 0) == 0
    jobs = computed(side, first, 0)
    side.reset()
    finish(side, jobs, stored=True)
    side.new_request(second)
    assert matched(side, second, 8) == 0
    [job] = computed(side, second, 8)
    assert job.first_block == 0
    finish(side, [job], stored=True)
    for request in (first, second):
        side.finished(request, [])


def test_hints_go_with_the_question_and_with_the_save(
    sides: tuple[SchedulerSide, Noted, Pool], caplog: pytest.LogCaptureFixture
) -> None:
    side, lookups, _ = sides
    given = {"ended": True, "priority": 1, "idle_seconds": 30, "do_remote_prefill": False}
    bad = {"priority": "urgent"}
    requests = [
        Request(tokens(seed, 3 * SIZE), params, name)
        for seed, name, params in ((20, "good", given), (21, "bad", bad), (22, "bad again", bad))
    ]
    for request in requests:
        side.new_request(request)
        assert matched(side, request, 0) == 0
        jobs = computed(side, request, 0)
        assert [job.hints for job in jobs] == [lookups.questions[-1].hints]
        finish(side, jobs, stored=True)
        side.finished(request, [])
    expected = Hints(ended=True, priority=1, idle_seconds=30)
    assert [question.hints for question in lookups.questions] == [expected, NO_HINTS, NO_HINTS]
    [line] = [text for text in caplog.messages if "hints" in text]
    assert "hints of request bad: hints.priority is 'urgent', expected a whole number" in line


@pytest.fixture
def windowed(server: Sidecar) -> Iterator[SchedulerSide]:
    """Of an engine whose second group of layers sees 65 tokens: two blocks and one."""
    side = side_of(
        CacheGroups(SIZE, (("full",), ("window",)), 2 * SIZE + 1), Noted(Client(server.address)), Pool()
    )
    yield side
    side.close()
    await_idle(server)


def test_all_groups_of_layers_are_loaded_but_for_the_last_token(windowed: SchedulerSide) -> None:
    request = Request(PROMPT[: 10 * SIZE])
    windowed.new_request(request)
    assert matched(windowed, request, 4) == 5, "the tenth block has the last token"
    table = [number for block in range(1, 10) for number in (block, NULL_BLOCK if block < 8 else 20 + block)]
    windowed.allocated(request, table, 5 * SIZE)
    [job] = windowed.orders([], lambda request_id: []).loads
    assert job.block_ids == [5, 0, 6, 0, 7, 0, 8, 28, 9, 29]
    progress = Progress()
    progress.load_over("r", 3)
    windowed.progressed(progress, set())
    assert matched(windowed, request, 0) == 0, "it is not tried again"
    windowed.finished(request, [])


def test_what_is_generated_is_saved_while_windows_have_it(windowed: SchedulerSide) -> None:
    request = Request(tokens(9, 3 * SIZE))
    windowed.new_request(request)
    assert matched(windowed, request, 0) == 0
    saved: list[tuple[int, int]] = []
    for computed_tokens in [0, *range(3 * SIZE, 9 * SIZE)]:
        if computed_tokens:
            request.all_token_ids = [*request.all_token_ids, 1]
        step = 1 if computed_tokens else 3 * SIZE
        request.num_tokens, request.num_computed_tokens = len(request.all_token_ids), computed_tokens
        held = max(0, computed_tokens - 2 * SIZE) // SIZE
        table = [
            number for block in range(9) for number in (block + 1, NULL_BLOCK if block < held else block + 21)
        ]
        jobs = windowed.orders([("r", step)], {"r": table}.__getitem__).saves
        saved += [(job.first_block, len(job.block_ids) // 2) for job in jobs]
        finish(windowed, jobs, stored=True)
    assert saved == [(0, 3), (3, 5), (5, 7), (7, 9)]
    windowed.finished(request, [])


class TestKnownBlocks:
    def test_leading(self) -> None:
        known = KnownBlocks(lambda: 0.0)
        known.add([b"a", b"b", b"d"])
        assert known.leading([b"a", b"b", b"c", b"d"], 4) == 2
        assert known.leading([b"a", b"b"], 1) == 1
        assert known.leading([b"a"], 5) == 1
        known.clear()
        assert known.leading([b"a"], 1) == 0

    def test_the_oldest_are_forgotten(self) -> None:
        known = KnownBlocks(lambda: 0.0, limit=2)
        known.add([b"a", b"b"])
        known.add([b"a", b"c"])
        assert [known.leading([each], 1) for each in (b"a", b"b", b"c")] == [1, 0, 1]

    def test_what_is_known_may_be_so_no_longer(self) -> None:
        now = 0.0
        known = KnownBlocks(lambda: now, seconds=10.0)
        known.add([b"a", b"b"])
        now = 9.0
        known.add([b"b"])
        assert known.leading([b"a", b"b"], 2) == 2
        now = 10.0
        assert known.leading([b"a", b"b"], 2) == 0
        assert known.leading([b"b"], 1) == 1
