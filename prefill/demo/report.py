"""What the demo tells: a table for people, one JSON object for programs."""

from __future__ import annotations

from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.block import TierName
from prefill.demo.run import PHASES, Outcome, Row

_TIERS = (TierName.DEVICE, TierName.HOST, TierName.REDIS)
_LEGEND = (
    "Prompt tokens by the tier that they came from. Three prompts arrive together.\n"
    "Queue: waiting for the ones before, and for device memory, which holds about\n"
    "one conversation. TTFT = queue + exec; cold: TTFT of the same without a cache.\n"
    "Byte flipped: in a block half-way, so what is behind it is computed again.\n"
)

_SERVE = (
    "Such a store as a server, empty at first, with a live page of its hits at http://127.0.0.1:9470/:\n"
    "  .venv/bin/kvstore serve --redis-url embedded"
)

JsonValue = (
    None | bool | int | float | str | dict[str, int] | dict[str, float] | list[str] | list[dict[str, object]]
)


def as_json(outcome: Outcome) -> dict[str, JsonValue]:
    """One object. Hits and asked are tokens of all requests with the cache.

    Times are milliseconds, the four medians over requests that hit something; null when none did.
    """
    reused = [row for row in outcome.rows if row.warm.cached]
    counts = outcome.counts
    return {
        "identical": is_identical(outcome),
        "requests": [_request(row) for row in outcome.rows],
        "hit_tokens": {tier.value: counts.hit.get(tier.value, 0) for tier in _TIERS},
        "asked_tokens": counts.asked,
        "hit_rate": sum(counts.hit.values()) / counts.asked,
        "ttft_cold_ms": _median_ms([row.cold.ttft_seconds for row in reused]),
        "ttft_warm_ms": _median_ms([row.warm.ttft_seconds for row in reused]),
        "execution_cold_ms": _median_ms([row.cold.execution_seconds for row in reused]),
        "execution_warm_ms": _median_ms([row.warm.execution_seconds for row in reused]),
        "corrupt_misses": counts.corrupt,
        "left_out": left_out(outcome),
    }


def left_out(outcome: Outcome) -> list[str]:
    """Parts that could not be run: without a Redis there is no byte to flip."""
    done = {row.phase for row in outcome.rows}
    return [phase for phase in PHASES if phase not in done]


def is_identical(outcome: Outcome) -> bool:
    """Did every request give the same tokens with the cache and without?"""
    return bool(outcome.rows) and all(row.identical for row in outcome.rows)


def as_table(outcome: Outcome) -> RenderableType:
    """Requests in rows, by phase, then the totals; fits a terminal of 80 columns."""
    table = Table(
        title="Requests with the cache; times in ms",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("request")
    for heading in ("prompt", *_TIERS, "computed", "queue", "exec", "TTFT", "cold"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    phase = ""
    for row in outcome.rows:
        if row.phase != phase:
            phase = row.phase
            table.add_row(Text(phase, style="bold"))
        table.add_row(*_cells(row))
    return Group(table, Text(_LEGEND, style="dim"), _totals(outcome), Text(f"\n{_SERVE}", style="dim"))


def _cells(row: Row) -> tuple[str, ...]:
    warm = row.warm
    times = (warm.queue_seconds, warm.execution_seconds, warm.ttft_seconds, row.cold.ttft_seconds)
    return (
        warm.request_id,
        str(warm.prompt_tokens),
        *(str(warm.cached.get(tier, 0)) for tier in _TIERS),
        str(warm.computed_tokens),
        *(f"{_ms(seconds):.0f}" for seconds in times),
        "same" if row.identical else "DIFFERENT",
    )


def _totals(outcome: Outcome) -> Text:
    counts = outcome.counts
    hits = sum(counts.hit.values())
    by_tier = ", ".join(f"{tier} {counts.hit.get(tier, 0) / counts.asked:.1%}" for tier in _TIERS)
    cold = sum(row.cold.execution_seconds for row in outcome.rows)
    warm = sum(row.warm.execution_seconds for row in outcome.rows)
    missing = "".join(f"Left out, for lack of a Redis: {phase}.\n" for phase in left_out(outcome))
    verdict = "every output is token-identical" if is_identical(outcome) else "OUTPUTS DIFFER"
    return Text(
        f"Hits: {hits / counts.asked:.1%} of {counts.asked} prompt tokens: {by_tier}.\n"
        f"Spared: {hits} tokens; prefill took {warm:.1f} s with the cache, {cold:.1f} s without it.\n"
        f"Blocks found corrupt: {counts.corrupt}.\n{missing}"
        f"With and without the cache, {verdict}."
    )


def _request(row: Row) -> dict[str, object]:
    warm, cold = row.warm, row.cold
    return {
        "request_id": warm.request_id,
        "phase": row.phase,
        "prompt_tokens": warm.prompt_tokens,
        "cached_tokens": {tier.value: warm.cached.get(tier, 0) for tier in _TIERS},
        "computed_tokens": warm.computed_tokens,
        "queue_ms": _ms(warm.queue_seconds),
        "execution_ms": _ms(warm.execution_seconds),
        "ttft_ms": _ms(warm.ttft_seconds),
        "ttft_without_cache_ms": _ms(cold.ttft_seconds),
        "execution_without_cache_ms": _ms(cold.execution_seconds),
        "identical": row.identical,
        "output_tokens": warm.tokens,
    }


def _median_ms(seconds: list[float]) -> float | None:
    return _ms(median(seconds)) if seconds else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
