"""Several instances behind a router, times to first token, recordings, sizes and pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstore.commands.plot import plotter
from kvstore.commands.simulate import simulate
from kvstore.commands.simulate_options import SimulateOptions
from kvstore.errors import ConfigError
from kvstore.evict.lru import LRU
from kvstore.hints import Hints
from kvstore.simulate import (
    FleetPlan,
    PrefillRates,
    Routing,
    Workload,
    replay_fleet,
    times_to_first_token,
)
from kvstore.trace import TraceError, read_trace
from tests.support.policy_workloads import workload_of


def hits(prompts: Sequence[list[int]], blocks: int | None, plan: FleetPlan) -> list[tuple[int, int]]:
    found = replay_fleet(workload_of(enumerate(prompts)), LRU, blocks, plan)
    return list(zip(found.hit, found.own, strict=True))


def answer(trace: Path, **options: Any) -> dict[str, Any]:
    messages = Console(file=io.StringIO())
    return dict(simulate([trace], SimulateOptions(**options), {}, messages).facts)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two prompts of two blocks in turns, as Mooncake writes them."""
    prompts = [[1, 2], [3, 4]] * 4
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": 1000 * at, "input_length": 1024, "hash_ids": ids})
        for at, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# -- routing ------------------------------------------------------------------------------------------------


def test_in_turn_two_instances_see_every_other_request() -> None:
    plan = FleetPlan(2, Routing.ROUND_ROBIN)
    assert hits([[1, 2], [1, 2], [1, 2], [3]], None, plan) == [(0, 0), (0, 0), (2, 2), (0, 0)]


def test_a_session_stays_where_it_began() -> None:
    """Both have a first block in common, which is no more than half of the prompts."""
    plan = FleetPlan(2, Routing.SESSION)
    grown = [[0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    assert hits(grown, None, plan) == [(0, 0), (0, 0), (2, 2), (2, 2), (3, 3)]


def test_a_prompt_goes_to_who_has_more_than_half_of_it_else_to_who_has_least_to_do() -> None:
    plan = FleetPlan(2, Routing.PREFIX)
    asked = [[1, 2, 3], [1, 2, 3], [1, 9], [1, 2, 3], [1, 9]]
    # The third shares one of two blocks with the first, and goes to the instance that is idle.
    assert hits(asked, None, plan) == [(0, 0), (3, 3), (0, 0), (3, 3), (2, 2)]


def test_a_shared_tier_hits_what_another_instance_computed() -> None:
    plan = FleetPlan(2, Routing.ROUND_ROBIN, shared_blocks=10)
    assert hits([[1, 2], [1, 2], [1, 2]], 10, plan) == [(0, 0), (2, 0), (2, 2)]


def test_the_oracle_is_asked_for_one_cache_only(trace: Path) -> None:
    """What a router will send to each of several, nobody can read from the trace."""
    alone = [row["policy"] for row in answer(trace, policy="all", capacity="2")["results"]]
    several = [row["policy"] for row in answer(trace, policy="all", capacity="2", instances=2)["results"]]
    assert alone == [*several, "oracle"]
    with pytest.raises(ConfigError, match=r"--policy names oracle, which knows the future of one cache"):
        answer(trace, policy="lru,oracle", capacity="2", instances=2)


def test_the_oracle_above_a_shared_tier_is_still_one_cache(trace: Path) -> None:
    (row,) = answer(trace, policy="oracle", capacity="3", shared="3")["results"]
    assert 0 < row["hit_blocks_own"] <= row["hit_blocks"]


def test_one_instance_is_one_cache(trace: Path) -> None:
    alone = answer(trace, capacity="2,3,4")["results"]
    for routing in Routing:
        assert answer(trace, capacity="2,3,4", routing=routing.value)["results"] == alone


# -- times to first token -----------------------------------------------------------------------------------


def test_times_to_first_token_are_what_is_computed_and_what_is_loaded() -> None:
    """1,000 tokens, of which the second request has 900."""
    workload = workload_of([(0.0, list(range(1000))), (1.0, list(range(1000)))])
    computed = times_to_first_token(workload, [0, 900], PrefillRates(tokens_per_second=100.0))
    assert computed.mean == pytest.approx((10 + 1) / 2)
    loaded = times_to_first_token(workload, [0, 900], PrefillRates(100.0, 0.0, 4500.0, 10))
    assert loaded.mean == pytest.approx((10 + 1 + 2) / 2)
    pairs = times_to_first_token(workload, [0, 900], PrefillRates(1e12, 1e-6))
    expected = [sum(range(1000)), sum(range(900, 1000))]
    assert pairs.mean == pytest.approx(1e-6 * sum(expected) / 2, rel=1e-4)


def test_a_prompt_that_is_there_as_a_whole_computes_a_token() -> None:
    workload = workload_of([(0.0, [1, 2, 3])])
    assert times_to_first_token(workload, [3], PrefillRates(10.0)).p99 == pytest.approx(0.1)


# -- a time to live ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", [{}, {"instances": 2, "routing": "prefix"}])
@pytest.mark.parametrize(
    ("idle_ttl", "seconds", "share"), [("1s", 1.0, 0.0), ("3s", 3.0, 0.75), (None, None, 0.75)]
)
def test_what_comes_back_after_its_time_to_live_is_missed(
    trace: Path, fleet: dict[str, Any], idle_ttl: str | None, seconds: float | None, share: float
) -> None:
    """Each prompt comes back after two seconds; a router does not take for a prefix what is over its time."""
    facts = answer(trace, capacity="unlimited", idle_ttl=idle_ttl, **fleet)
    assert facts["idle_ttl_seconds"] == seconds
    assert facts["unlimited"]["hit_blocks"] == 0.75
    assert [row["hit_blocks"] for row in facts["results"]] == [share]


# -- sizes --------------------------------------------------------------------------------------------------


def test_a_size_is_so_many_blocks_of_a_model(trace: Path, tmp_path: Path) -> None:
    token = 2 * 2 * 4 * 8 * 2  # layers, keys and values, heads, head size, bfloat16
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "hidden_size": 32,
                "torch_dtype": "bfloat16",
            }
        )
    )
    size = f"{3 * 512 * token}B"
    (row,) = answer(trace, capacity=size, model=str(tmp_path))["results"]
    assert row["capacity_blocks"] == 3
    (row,) = answer(trace, capacity=size, bytes_per_token=token)["results"]
    assert row["capacity_blocks"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": "1GiB"}, "--capacity names the size '1GiB', expected to know what a block takes"),
        ({"capacity": "1B", "bytes_per_token": 1}, "--capacity names '1B', expected room for at least one"),
        ({"routing": "random"}, "--routing is 'random', expected one of round_robin, session, prefix"),
        ({"shared": "1k,2k"}, "--shared is '1k,2k', expected one capacity"),
        ({"shared": "none"}, "--shared names 'none', expected a number of blocks"),
        ({"load_bytes_per_second": "1GB"}, "need --prefill-tokens-per-second; add it"),
        ({"prefill_tokens_per_second": 0.0}, "--prefill-tokens-per-second is 0.0, expected more than 0"),
        (
            {"prefill_tokens_per_second": 1.0, "load_bytes_per_second": "1GB"},
            "--load-bytes-per-second needs to know what a token takes; give --model or --bytes-per-token",
        ),
        (
            {"prefill_tokens_per_second": 1.0, "load_bytes_per_second": "fast", "bytes_per_token": 1},
            "--load-bytes-per-second is 'fast': expected a size",
        ),
        ({"idle_ttl": "soon"}, "--idle-ttl is 'soon': expected a duration above zero"),
        ({"recommend": "100%", "instances": 2}, "2 instances with routing round_robin do not reach"),
        ({"model": "/nowhere"}, "--model is '/nowhere', which is no folder with a config.json"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(trace: Path, options: dict[str, Any], message: str) -> None:
    if options.get("instances"):
        # Every other request: each instance sees both prompts half as often.
        prompts = [[1, 2], [1, 2]] * 4
        lines = [{"timestamp": at, "input_length": 1024, "hash_ids": ids} for at, ids in enumerate(prompts)]
        trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        answer(trace, **options)
    assert message in str(raised.value)


# -- recordings ---------------------------------------------------------------------------------------------

HEAD = {"recording": 1, "block_size": 16, "created": "2026-01-01T00:00:00+00:00"}


def recorded(**changes: Any) -> dict[str, Any]:
    line = {
        "time": 0.5,
        "namespace": "0a1b2c3d",
        "prompt_tokens": 40,
        "block_size": 16,
        "hashes": [2**64 - 1, 7],
        "hit_blocks": 0,
        "ended": False,
        "priority": 0,
        "idle_seconds": None,
    }
    return line | changes


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_a_recording_is_read_with_its_hints_and_namespaces(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        HEAD,
        recorded(),
        recorded(time=2.0, ended=True, priority=-3, idle_seconds=4.5),
        recorded(time=3.0, namespace="ffffffff"),
    )
    requests = read_trace([path])
    assert [(request.time, request.tokens, request.block_tokens) for request in requests] == [
        (0.5, 40, 16),
        (2.0, 40, 16),
        (3.0, 40, 16),
    ]
    assert [request.hints for request in requests] == [
        Hints(),
        Hints(ended=True, priority=-3, idle_seconds=4.5),
        Hints(),
    ]
    found = replay_fleet(Workload.of(requests), LRU, None)
    assert found.hit == [0, 2, 0], "the same numbers in another namespace are other blocks"
    assert answer(path, capacity="unlimited")["unlimited"]["hit_tokens"] == pytest.approx(32 / 120)
    assert answer(path, capacity="unlimited")["unlimited"]["hit_full_tokens"] == pytest.approx(32 / 96)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [{"recording": 2}],
            ":1: recording is wrong (Input should be 1): got 2; expected a recording that begins",
        ),
        (
            [HEAD, recorded(hashes=[1, 2, 3])],
            ":2: hashes has 3 numbers, expected at most 2 for 40 prompt_tokens",
        ),
        ([HEAD, recorded(priority=9)], ":2: priority is wrong"),
        ([HEAD, recorded(idle_seconds=-1.0)], ":2: idle_seconds is wrong"),
        ([HEAD, {"time": 1.0}], ":2: namespace is wrong (Field required)"),
        ([HEAD, recorded(time="now")], ":2: time is wrong"),
    ],
)
def test_a_bad_line_of_a_recording_is_named(
    tmp_path: Path, lines: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(TraceError) as raised:
        read_trace([write(tmp_path / "r.jsonl", *lines)])
    assert message in str(raised.value)
    assert "expected" in str(raised.value)


# -- pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "magic"), [("out.png", b"\x89PNG"), ("out.svg", b"<?xml")])
def test_a_picture_is_drawn(trace: Path, tmp_path: Path, name: str, magic: bytes) -> None:
    facts = answer(trace, policy="lru,oracle", capacity="2,4,unlimited")
    plotter(tmp_path / name)(facts)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(magic)
    plotter(tmp_path / f"again-{name}")(facts)
    assert (tmp_path / f"again-{name}").read_bytes() == drawn


def test_a_picture_needs_a_known_ending_and_a_place(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--plot is out\.jpg, expected a name that ends in \.png or \.svg"):
        plotter(Path("out.jpg"))
    with pytest.raises(ConfigError, match=r"--plot .*absent/out\.png cannot be written"):
        plotter(tmp_path / "absent/out.png")(answer(trace, capacity="2"))
