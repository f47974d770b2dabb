"""A scripted workload gives exact counter values, in tokens, counted once a request.

Cases 43-45 of what users of such systems run into (LMCache #1260 #2574 #2912 #4216; vllm #30522;
pegainfer #953, production-stack #818).
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvstore.block import MissCause, TierName
from kvstore.events import BlocksReused, BytesMoved, RequestSettled
from kvstore.metric_table import MODELS_MAX, OTHER
from kvstore.metrics import Metrics
from tests.support.counted_store import (
    Samples,
    ask,
    counted_store,
    forget_in_memory,
    run_script,
    samples_of,
    unread_in,
)
from tests.support.stores import EXTENT_BYTES, PAYLOAD_BYTES, make_chain, make_spec

GOLDEN: Samples = {
    'kvstore_asked_tokens_total{model="tiny"}': 26 + 24 + 13 + 24 + 3 + 24 + 24,
    'kvstore_hit_tokens_total{model="tiny",tier="host"}': 24 + 12 + 16,
    'kvstore_hit_tokens_total{model="tiny",tier="redis"}': 24 + 12,
    'kvstore_miss_tokens_total{model="tiny",cause="cold"}': 12 + 12,
    'kvstore_miss_tokens_total{model="tiny",cause="stale"}': 8,
    'kvstore_miss_tokens_total{model="tiny",cause="tail"}': 2 + 1 + 3,
    'kvstore_miss_tokens_total{model="tiny",cause="corrupt"}': 12,
    # A tier is asked for what the faster ones did not have, and nobody asks redis for a tail.
    'kvstore_tier_asked_tokens_total{tier="host"}': 24 + 24 + 12 + 24 + 24 + 24,
    'kvstore_tier_asked_tokens_total{tier="redis"}': 12 + 12 + 24 + 24,
    "kvstore_probe_tokens_total{}": 26,
    # Behind the damaged block two good ones arrive.
    'kvstore_stored_blocks_total{tier="host"}': 6 + 6 + 5,
    'kvstore_stored_blocks_total{tier="redis"}': 6,
    'kvstore_evicted_blocks_total{tier="host",cause="capacity"}': 6 + 6,
    'kvstore_evicted_blocks_total{tier="redis",cause="corrupt"}': 1,
    'kvstore_dropped_blocks_total{tier="host",cause="deadline"}': 2,
    'kvstore_transfer_bytes_total{from="host",to="redis"}': 6 * PAYLOAD_BYTES,
    'kvstore_transfer_bytes_total{from="redis",to="host"}': (6 + 5) * PAYLOAD_BYTES,
    'kvstore_transfer_seconds_count{from="host",to="redis"}': 1,
    'kvstore_transfer_seconds_count{from="redis",to="host"}': 2,
    'kvstore_block_reuse_gap_seconds_count{tier="host"}': 6 + 3 + 6,
    'kvstore_block_lifetime_seconds_count{tier="host"}': 6 + 6,
    'kvstore_block_idle_before_evict_seconds_count{tier="host"}': 6 + 6,
    'kvstore_pool_bytes{tier="host",state="ready"}': 5 * PAYLOAD_BYTES,
    'kvstore_pool_bytes{tier="host",state="free"}': EXTENT_BYTES - 5 * PAYLOAD_BYTES,
    'kvstore_tier_healthy{tier="host"}': 1,
    'kvstore_tier_healthy{tier="redis"}': 1,
    # The two behind the damaged block, which no request could use.
    'kvstore_unread_bytes{tier="host"}': 2 * PAYLOAD_BYTES,
    'kvstore_resident_bytes{tier="host",model="tiny"}': 5 * PAYLOAD_BYTES,
    'kvstore_whatif_asked_tokens_total{scale="1"}': 30,
    'kvstore_whatif_missed_tokens_total{scale="1"}': 10,
    'kvstore_whatif_capacity_bytes{scale="1"}': 1000,
    'kvstore_skipped_requests_total{by="whatif"}': 1,
    'kvstore_skipped_requests_total{by="recording"}': 1,
    'kvstore_background_failures_total{task="growth"}': 1,
    'kvstore_background_failures_total{task="tick"}': 1,
}


def test_a_script_gives_exact_values() -> None:
    """Twice in one process, beside each other: nothing is global."""
    spec = make_spec("tiny")
    with counted_store(spec) as first, counted_store(spec) as second:
        for store in (first, second):
            run_script(store, spec)
        assert samples_of(first.registry) == GOLDEN
        assert samples_of(second.registry) == GOLDEN


def test_ages_of_blocks() -> None:
    spec = make_spec("tiny")
    with counted_store(spec) as counted:
        counted.rig.write(make_chain(spec, "abc"))
        counted.clock.advance(5.0)
        ask(counted, make_chain(spec, "ab"))
        counted.clock.advance(40.0)
        forget_in_memory(counted)
        value = counted.registry.get_sample_value
        for name, seconds, up_to in (
            ("reuse_gap", [5.0, 5.0], {"1.0": 0, "10.0": 2, "60.0": 2, "+Inf": 2}),
            ("lifetime", [45.0, 45.0, 45.0], {"10.0": 0, "60.0": 3, "+Inf": 3}),
            ("idle_before_evict", [40.0, 40.0, 45.0], {"10.0": 0, "60.0": 3, "+Inf": 3}),
        ):
            metric, tier = f"kvstore_block_{name}_seconds", {"tier": "host"}
            assert value(f"{metric}_sum", tier) == sum(seconds)
            assert value(f"{metric}_count", tier) == len(seconds)
            assert {le: value(f"{metric}_bucket", {**tier, "le": le}) for le in up_to} == up_to


def test_gauges_are_the_stores_own_books() -> None:
    spec = make_spec("tiny")
    with counted_store(spec) as counted:
        store = counted.rig.store
        counted.rig.write(make_chain(spec, "abc"))
        counted.rig.settle()
        lease = store.acquire("r", make_chain(spec, "ab"))
        write = store.write(make_chain(spec, "xyz"))
        overdue = store.write(make_chain(spec, "u"))
        overdue.deadline = counted.clock()
        counted.clock.advance(1.0)
        store.tick()
        usage = store.usage()[TierName.HOST]
        by_state = {state: getattr(usage, state) for state in ("free", "staged", "ready", "quarantined")}
        assert all(by_state.values())
        for state, size in by_state.items():
            labels = {"tier": "host", "state": state}
            assert counted.registry.get_sample_value("kvstore_pool_bytes", labels) == size
        leased = counted.registry.get_sample_value("kvstore_leased_bytes", {"tier": "host"})
        assert leased == usage.leased == 2 * PAYLOAD_BYTES
        assert counted.registry.get_sample_value("kvstore_leases") == 1
        write.abort()
        overdue.abort()
        store.release(lease)
        assert counted.registry.get_sample_value("kvstore_leases") == 0


def test_unread_bytes_are_those_in_the_pools_books() -> None:
    """After a write, first and second reads, an eviction of read and unread blocks, a return from redis."""
    spec = make_spec("tiny")
    with counted_store(spec) as counted:

        def unread() -> float | None:
            return counted.registry.get_sample_value("kvstore_unread_bytes", {"tier": "host"})

        for act, expected in (
            (lambda: counted.rig.write(make_chain(spec, "abcdef")), 6),
            (lambda: ask(counted, make_chain(spec, "abcd"), used_blocks=1), 2),
            (lambda: ask(counted, make_chain(spec, "abcdxy")), 2),
            (lambda: counted.rig.write(make_chain(spec, "uv")), 4),
            (lambda: forget_in_memory(counted), 0),
            (lambda: ask(counted, make_chain(spec, "abcdef")), 0),
        ):
            act()
            counted.rig.settle()
            assert unread() == unread_in(counted.rig.host) == expected * PAYLOAD_BYTES


def test_unread_bytes_go_on_from_what_was_there() -> None:
    """A pool that was taken over holds blocks that no event told of."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, lambda _: "model", {TierName.HOST: 300})
    metrics(BlocksReused(1.0, TierName.HOST, b"", np.zeros(0), 2, 100))
    assert samples_of(registry) == {'kvstore_unread_bytes{tier="host"}': 100}


@st.composite
def settled_requests(draw: st.DrawFn) -> RequestSettled:
    """Any request that a store may report: hits and misses add up to what was asked."""
    hits = draw(st.dictionaries(st.sampled_from(TierName), st.integers(0, 10_000)))
    misses = draw(st.dictionaries(st.sampled_from(MissCause), st.integers(0, 10_000)))
    model = bytes([draw(st.integers(0, 80))])
    asked = sum(hits.values()) + sum(misses.values())
    return RequestSettled(1.0, model, asked, hits, misses, hits)


def total(registry: CollectorRegistry, name: str) -> float:
    families = [family for family in registry.collect() if family.name == name]
    return sum(sample.value for sample in families[0].samples if sample.name == f"{name}_total")


def models_of(registry: CollectorRegistry) -> set[str]:
    return {
        sample.labels["model"]
        for family in registry.collect()
        for sample in family.samples
        if "model" in sample.labels
    }


@given(st.lists(settled_requests(), max_size=100))
def test_hits_and_misses_add_up_to_what_was_asked(events: list[RequestSettled]) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, lambda namespace: f"model {namespace[0]}")
    for event in events:
        metrics(event)
        hits, misses = total(registry, "kvstore_hit_tokens"), total(registry, "kvstore_miss_tokens")
        assert hits + misses == total(registry, "kvstore_asked_tokens")
    assert total(registry, "kvstore_asked_tokens") == sum(event.asked_tokens for event in events)
    assert len(models_of(registry) - {OTHER}) <= MODELS_MAX


def test_models_past_the_limit_are_counted_together() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, lambda namespace: f"model {namespace[0]}")
    for _ in range(2):
        for number in range(MODELS_MAX + 10):
            metrics(RequestSettled(1.0, bytes([number]), 1, miss_tokens={MissCause.COLD: 1}))
    assert len(models_of(registry)) == MODELS_MAX + 1
    assert registry.get_sample_value("kvstore_asked_tokens_total", {"model": "model 0"}) == 2
    assert registry.get_sample_value("kvstore_asked_tokens_total", {"model": OTHER}) == 20


def test_bytes_from_and_to_the_caller() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, lambda _: "model")
    metrics(BytesMoved(1.0, None, TierName.HOST, 100, 0.5))
    metrics(BytesMoved(1.0, TierName.DEVICE, None, 200, 0.25))
    assert samples_of(registry) == {
        'kvstore_transfer_bytes_total{from="caller",to="host"}': 100,
        'kvstore_transfer_bytes_total{from="device",to="caller"}': 200,
        'kvstore_transfer_seconds_count{from="caller",to="host"}': 1,
        'kvstore_transfer_seconds_count{from="device",to="caller"}': 1,
    }
    seconds = registry.get_sample_value("kvstore_transfer_seconds_sum", {"from": "device", "to": "caller"})
    assert seconds == 0.25
