"""Replay: published figures, a slow model of LRU over leaves, and what is said of a bad trace."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvstore.commands.simulate import simulate
from kvstore.commands.simulate_options import SimulateOptions
from kvstore.errors import ConfigError
from kvstore.evict.lru import LRU
from kvstore.simulate import HitCounts, Instance, Traffic, Workload, count_hits, replay
from kvstore.trace import Request, TraceError, read_trace

REPOSITORY = Path(__file__).resolve().parents[2]
CONVERSATION = REPOSITORY / "tests/data/conversation_trace.jsonl.gz"
BLOCK = 512
POINTS = 0.1
NO_SHARES = ["0%", "101%", "half", "80"]

Ids = Sequence[int]


def line(ids: Ids, tail: int = BLOCK, timestamp: float = 0, **changes: Any) -> str:
    """One line of a trace, whose last block holds ``tail`` tokens."""
    length = (len(ids) - 1) * BLOCK + tail
    fields = {"timestamp": timestamp, "input_length": length, "output_length": 1, "hash_ids": list(ids)}
    return json.dumps(fields | changes) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def hits_of(requests: Sequence[Request], blocks: int) -> list[int]:
    instance = Instance(LRU, Workload.of(requests), blocks)
    return [instance.serve(number) for number in range(len(requests))]


def run_cli(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore", *map(str, arguments)]
    plain = {
        name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "TTY_COMPATIBLE"}
    }
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False, env=plain | environ
    )


# -- the conversation trace -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation() -> Workload:
    return Workload.of(read_trace([CONVERSATION]))


@pytest.mark.parametrize(
    ("blocks", "percent"),
    [(1_000, 4.45), (3_000, 6.53), (10_000, 21.16), (30_000, 32.57), (50_000, 35.46), (100_000, 36.37)],
)
def test_lru_hits_what_it_is_known_to_hit(conversation: Workload, blocks: int, percent: float) -> None:
    assert replay(conversation, LRU, blocks).block_rate * 100 == pytest.approx(percent, abs=POINTS)


def test_the_ceiling_is_what_two_public_tools_print(conversation: Workload) -> None:
    counts = replay(conversation, LRU, None)
    assert (counts.requests, counts.asked.blocks) == (12_031, 288_500)
    assert counts.block_rate * 100 == pytest.approx(36.64, abs=POINTS)
    assert counts.token_rate * 100 == pytest.approx(37.4, abs=POINTS)
    assert counts.token_rate_warm * 100 == pytest.approx(39.8, abs=POINTS)


# -- what a hit is ------------------------------------------------------------------------------------


def test_a_hit_is_a_leading_run_and_its_tokens_those_of_the_prompt(tmp_path: Path) -> None:
    """The last block of the first prompt holds 100 tokens, and is hit as these 100."""
    lines = (line([1, 2, 3], tail=100), line([1, 2, 3], tail=100), line([1, 2, 4]), line([9, 2, 3]))
    requests = read_trace([write(tmp_path / "trace.jsonl", *lines)])
    assert hits_of(requests, 100) == [0, 3, 2, 0]
    assert replay(Workload.of(requests), LRU, None) == HitCounts(
        requests=4,
        asked=Traffic(blocks=12, tokens=1124 + 1124 + 1536 + 1536, full_tokens=1024 + 1024 + 1536 + 1536),
        hit=Traffic(blocks=5, tokens=1124 + 1024, full_tokens=1024 + 1024),
        asked_warm=Traffic(blocks=6, tokens=1536 + 1536, full_tokens=1536 + 1536),
        hit_warm=Traffic(blocks=2, tokens=1024, full_tokens=1024),
    )


def test_the_middle_request_of_an_odd_number_is_warm(tmp_path: Path) -> None:
    requests = read_trace([write(tmp_path / "trace.jsonl", line([1]), line([1]), line([1]))])
    counts = count_hits(Workload.of(requests), [0, 1, 1])
    assert (counts.asked_warm.tokens, counts.hit_warm.tokens) == (2 * BLOCK, 2 * BLOCK)


def test_a_tail_goes_before_its_head(tmp_path: Path) -> None:
    lines = (line([1, 2, 3]), line([7]), line([1, 2, 3]))
    requests = read_trace([write(tmp_path / "trace.jsonl", *lines)])
    assert hits_of(requests, 3) == [0, 0, 2]


def test_a_prompt_longer_than_the_cache_keeps_its_head(tmp_path: Path) -> None:
    lines = (line([1, 2, 3, 4, 5]), line([1, 2, 3, 4, 5]), line([1, 2, 8, 9]), line([1, 2, 8, 9]))
    requests = read_trace([write(tmp_path / "trace.jsonl", *lines)])
    assert hits_of(requests, 3) == [0, 3, 2, 3]


def test_a_hit_keeps_a_prompt_young(tmp_path: Path) -> None:
    lines = (line([1]), line([2]), line([1]), line([3]), line([1]), line([2]))
    requests = read_trace([write(tmp_path / "trace.jsonl", *lines)])
    assert hits_of(requests, 2) == [0, 0, 1, 0, 1, 0]


def test_a_cache_without_a_block_is_refused(tmp_path: Path) -> None:
    requests = read_trace([write(tmp_path / "trace.jsonl", line([1]))])
    with pytest.raises(ConfigError, match="capacity is 0 blocks, expected at least 1"):
        replay(Workload.of(requests), LRU, 0)


# -- against a model ----------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def model_hits(asked: Sequence[Ids], capacity: int) -> list[int]:
    """LRU over leaves, one block at a time. Names are whole prefixes; the deepest of a request goes first."""
    last_used: dict[tuple[int, ...], tuple[int, int]] = {}
    depths = []
    for now, prompt in enumerate(asked):
        names = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
        depth = 0
        while depth < len(names) and names[depth] in last_used:
            depth += 1
        depths.append(depth)
        for at, name in enumerate(names[:capacity]):
            last_used[name] = (now, -at)
        while len(last_used) > capacity:
            inner = {name[:-1] for name in last_used}
            leaves = [name for name in last_used if name not in inner]
            del last_used[min(leaves, key=last_used.__getitem__)]
    return depths


@given(st.lists(prompts, min_size=1, max_size=40), st.integers(1, 16))
def test_replay_hits_what_a_list_of_single_blocks_hits(
    tmp_path_factory: pytest.TempPathFactory, asked: list[list[int]], capacity: int
) -> None:
    """Ids repeat behind other ids, and within a prompt: what counts is the whole prefix."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    requests = read_trace([write(path, *(line(ids) for ids in asked))])
    expected = model_hits(asked, capacity)
    assert hits_of(requests, capacity) == expected
    assert hits_of(requests, capacity) == expected, "a second replay differs"


# -- reading ------------------------------------------------------------------------------------------


def test_files_are_merged_by_time_and_share_their_ids(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", line([1, 2], timestamp=0), "\n", line([1, 2, 3], timestamp=2500))
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(line([1, 2, 4], timestamp=1000).encode()))
    requests = read_trace([first, second])
    assert [request.time for request in requests] == [0, 1.0, 2.5]
    assert hits_of(requests, 10) == [0, 2, 2]


def test_ids_may_be_of_any_size(tmp_path: Path) -> None:
    huge = [2**64 + 5, -3]
    requests = read_trace([write(tmp_path / "trace.jsonl", line(huge), line(huge), line([5, -3]))])
    assert hits_of(requests, 10) == [0, 2, 0]


BAD_LINES = {
    "no JSON": ("{oops\n", "Invalid JSON", "oops"),
    "no object": ("[1]\n", "the line is wrong", "[1]"),
    "no length": (
        '{"timestamp": 0, "hash_ids": [1]}\n',
        "input_length is wrong (Field required)",
        "timestamp",
    ),
    "no ids": ('{"timestamp": 0, "input_length": 5}\n', "hash_ids is wrong (Field required)", "timestamp"),
    "a text for an id": (line([1, 2], hash_ids=[1, "x"]), "hash_ids.1 is wrong", "'x'"),
    "a truth value for an id": (line([1], hash_ids=[True]), "hash_ids.0 is wrong", "True"),
    "a fraction for an id": (line([1], hash_ids=[1.5]), "hash_ids.0 is wrong", "1.5"),
    "a length of nothing": (line([1], input_length=0), "input_length is wrong", "got 0"),
    "a time before the start": (line([1], timestamp=-1), "timestamp is wrong", "-1"),
    "no time at all": (line([1], timestamp=float("nan")), "timestamp is wrong", "nan"),
    "an id too few": (line([1], input_length=513), "hash_ids has 1 ids, expected 2", "input_length 513"),
    "an id too many": (line([1, 2], input_length=512), "hash_ids has 2 ids, expected 1", "input_length 512"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    bad, problem, value = BAD_LINES[case]
    path = write(tmp_path / "trace.jsonl", line([1]), bad)
    with pytest.raises(TraceError) as raised:
        read_trace([path])
    message = str(raised.value)
    assert message.startswith(f"{path}:2: ")
    assert problem in message
    assert value in message
    assert "expected" in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl cannot be read .*No such file"):
        read_trace([tmp_path / "absent.jsonl"])


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_a_damaged_gzip_file_is_an_error_and_no_shorter_trace(tmp_path: Path, damage: str) -> None:
    packed = bytearray(CONVERSATION.read_bytes()[:50_000])
    if damage == "overwritten":
        packed[20_000:20_100] = bytes(100)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(packed)
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz(:\d+: | cannot be read after line [1-9])"):
        read_trace([path])


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no request"):
        read_trace([write(tmp_path / "trace.jsonl", "\n")])


# -- the command line ---------------------------------------------------------------------------------


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    return write(tmp_path / "small.jsonl", line([1, 2]), line([3, 4]), line([1, 2]), line([1, 2], tail=12))


def test_json_gives_fractions_by_policy_and_capacity(small_trace: Path) -> None:
    done = run_cli("simulate", small_trace, "--policy", "lru", "--capacity", "2,1k,unlimited", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    tokens, full = 3 * 1024 + 524, 3 * 1024 + 512
    wide = {
        "hit_blocks": 0.5,
        "hit_tokens": (1024 + 524) / tokens,
        "hit_full_tokens": (1024 + 512) / full,
        "hit_blocks_warm": 1.0,
        "hit_tokens_warm": 1.0,
        "hit_full_tokens_warm": 1.0,
    }
    tight = {
        "hit_blocks": 0.25,
        "hit_tokens": 524 / tokens,
        "hit_full_tokens": 512 / full,
        "hit_blocks_warm": 0.5,
        "hit_tokens_warm": 524 / 1548,
        "hit_full_tokens_warm": 512 / 1536,
    }
    assert json.loads(done.stdout) == {
        "trace": str(small_trace),
        "requests": 4,
        "asked_blocks": 8,
        "distinct_blocks": 4,
        "unlimited": wide,
        "instances": 1,
        "routing": "round_robin",
        "shared_blocks": 0,
        "idle_ttl_seconds": None,
        "results": [
            {"policy": "lru", "capacity_blocks": 2, **tight},
            {"policy": "lru", "capacity_blocks": 1000, **wide},
            {"policy": "lru", "capacity_blocks": None, **wide},
        ],
    }


def test_the_table_names_every_rate(small_trace: Path) -> None:
    done = run_cli("simulate", small_trace, "--capacity", "2,30K")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 requests" in done.stdout
    assert "hit tokens, warm" in done.stdout
    tight, wide = (row for row in done.stdout.splitlines() if "lru" in row)
    assert "25.00%" in tight
    assert "30,000" in wide
    assert "100.00%" in wide


def test_the_progress_bar_is_on_stderr(small_trace: Path) -> None:
    """FORCE_COLOR has rich take a pipe for a terminal."""
    done = run_cli("simulate", small_trace, "--json", FORCE_COLOR="1")
    assert "replaying" in done.stderr
    assert json.loads(done.stdout)["trace"] == str(small_trace)


@pytest.mark.parametrize("options", [SimulateOptions(), SimulateOptions(recommend="80%")])
def test_what_takes_long_says_how_far_it_is_where_there_is_no_terminal(
    small_trace: Path, options: SimulateOptions
) -> None:
    """Now and then; nothing where it is over soon."""
    for seconds in (100.0, 0.001):
        times, told = count(0.0, seconds), StringIO()
        simulate([small_trace], options, {}, Console(file=told, get_time=partial(next, times)))
        shares = [int(line.removeprefix("replaying: ")[:-1]) for line in told.getvalue().splitlines()]
        assert len(shares) >= 3 if seconds > 1 else not shares
        assert shares == sorted(set(shares))


def test_an_error_is_one_line_and_status_2(small_trace: Path) -> None:
    done = run_cli("simulate", small_trace, "absent.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: absent.jsonl cannot be read")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": "1k,many"}, "--capacity names 'many', expected a number of blocks"),
        ({"capacity": "0"}, "--capacity names '0', expected room for at least one block"),
        ({"policy": "mru"}, "--policy names 'mru', expected all or some of lru, lfu"),
        *(({"recommend": share}, "expected a share of what an unlimited cache hits") for share in NO_SHARES),
    ],
)
def test_an_option_that_makes_no_sense_is_named(
    small_trace: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        simulate([small_trace], SimulateOptions(**options), {}, Console(file=StringIO()))
    assert message in str(raised.value)


# -- token ids, several policies, recommendations -----------------------------------------------------


def tokens_line(tokens: Sequence[int], timestamp: float = 0) -> str:
    return json.dumps({"timestamp": timestamp, "token_ids": list(tokens)}) + "\n"


def test_prompts_given_as_tokens_are_cut_into_whole_blocks(tmp_path: Path) -> None:
    lines = (tokens_line(range(10)), tokens_line(range(10)), tokens_line([0, 1, 2, 3, 9, 9, 9, 9]))
    requests = read_trace([write(tmp_path / "trace.jsonl", *lines)], block_tokens=4)
    assert [len(request.chain) for request in requests] == [2, 2, 2]
    counts = replay(Workload.of(requests), LRU, None)
    assert (counts.asked.tokens, counts.hit.tokens) == (28, 8 + 4)


def test_a_token_that_is_none_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", '{"timestamp": 0, "token_ids": [1, -5]}\n')
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: token_ids\.1 is wrong .*got -5"):
        read_trace([path])


def test_prompts_shorter_than_a_block_are_no_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", tokens_line(range(10)))
    with pytest.raises(TraceError, match="has no prompt of 16 tokens"):
        read_trace([path])


def test_all_policies_are_asked_and_none_beats_the_oracle(small_trace: Path) -> None:
    done = run_cli("simulate", small_trace, "--policy", "all", "--capacity", "2", "--json")
    rates = {row["policy"]: row["hit_blocks"] for row in json.loads(done.stdout)["results"]}
    assert list(rates) == ["lru", "lfu", "s3fifo", "arc", "reuse", "oracle"]
    assert max(rates.values()) == rates["oracle"] == 0.5


def test_a_recommendation_is_the_least_capacity_that_suffices(tmp_path: Path) -> None:
    """Two prompts in turns: with three blocks LRU keeps one and the head of none, with four both."""
    asked = [line([1, 2]), line([3, 4])] * 5
    trace = write(tmp_path / "trace.jsonl", *asked)
    answer = simulate([trace], SimulateOptions(recommend="100%"), {}, Console(file=StringIO()))
    (row,) = answer.facts["results"]
    assert (row["capacity_blocks"], row["hit_blocks"]) == (4, 0.8)
    assert answer.parts[-1] == "Least capacity that hits 100% of the blocks that an unlimited cache hits"
