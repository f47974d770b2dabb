"""What is counted adds up, and the manual has all of it."""

from __future__ import annotations

from pathlib import Path

from kvstore.connectors.vllm.tally import COUNTERS, WAITS, Tally, merge

MANUAL = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_sums_of_ranks_and_steps_add_up() -> None:
    one, two = Tally(), Tally()
    one.add("hits", 1)
    one.add("hits", 2)
    one.waited(0.001)
    two.add("hits", 4)
    two.add("lookups", 1)
    two.waited(0.002)
    sums = one.take()
    merge(sums, two.take())
    assert sums == {"hits": 7, "lookups": 1, WAITS: [0.001, 0.002]}
    assert one.take() == {}


def test_the_manual_lists_every_counter() -> None:
    text = MANUAL.read_text(encoding="utf-8")
    for name, means in COUNTERS.items():
        assert f"| `vllm:kvstore_{name}_total` | {means} |" in text
    assert f"`vllm:kvstore_{WAITS}`" in text
