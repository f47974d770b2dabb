"""Laws that counters keep whatever happens to a store, and how many series there are at most."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvstore.block import WHOLE, TierName
from kvstore.hints import Hints
from kvstore.metric_table import METRICS, MODELS_MAX, OTHER, Kind
from kvstore.metrics import Metrics, StoreGauges, render
from kvstore.store import TieredStore, Tiers
from tests.support.counted_store import (
    Counted,
    ask,
    counted_store,
    flip_byte_in_redis,
    forget_in_memory,
    readings_of,
    samples_of,
)
from tests.support.stores import FakeClock, make_chain, make_host, make_spec, pool_folder

PROMPTS = ("abcdef", "abcxyz", "abcdefgh", "uv", "uvwxyz", "")
SPEC = make_spec("tiny")


class Laws:
    """What must hold after each step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._before: dict[tuple[str, ...], float] = {}

    def check(self) -> None:
        sums: dict[str, float] = defaultdict(float)
        by_tier: dict[tuple[str, str], float] = {}
        now: dict[tuple[str, ...], float] = {}
        removed: dict[str, float] = defaultdict(float)
        for family in self._registry.collect():
            for sample in family.samples:
                if family.type in ("counter", "histogram") and not sample.name.endswith("_created"):
                    now[sample.name, *sample.labels.values()] = sample.value
                    sums[sample.name] += sample.value
                if "tier" in sample.labels:
                    by_tier[sample.name, sample.labels["tier"]] = sample.value
                if sample.name == "kvstore_evicted_blocks_total":
                    removed[sample.labels["tier"]] += sample.value
        fallen = [name for name, value in self._before.items() if now[name] < value]
        assert not fallen, f"{fallen} fell"
        asked = sums["kvstore_asked_tokens_total"]
        assert asked == sums["kvstore_hit_tokens_total"] + sums["kvstore_miss_tokens_total"]
        for tier in TierName:
            hit = by_tier.get(("kvstore_hit_tokens_total", tier), 0)
            assert 0 <= hit <= by_tier.get(("kvstore_tier_asked_tokens_total", tier), 0)
            assert removed[tier] <= by_tier.get(("kvstore_stored_blocks_total", tier), 0)
        assert by_tier.get(("kvstore_unread_bytes", "host"), 0) >= 0
        self._before = now


def step(counted: Counted, what: str, prompt: str, used: int) -> None:
    """Something happens that is no request."""
    chain = make_chain(SPEC, prompt, tail=used)
    match what:
        case "write":
            counted.rig.write(chain)
            counted.rig.settle()
        case "probe":
            counted.rig.store.lookup(chain)
        case "forget" if counted.rig.host.pool.extents.classes():
            forget_in_memory(counted)
        case "clear":
            counted.rig.store.clear(None)
        case "lose":
            counted.redis.values.clear()
        case "damage" if counted.redis.values:
            known = [key[2] for key in counted.redis.values]
            if chain.rows(WHOLE) and chain.rows(WHOLE).hash_at(len(chain) - 1) in known:
                flip_byte_in_redis(counted, chain)
        case "wait":
            counted.clock.advance(31.0)
            counted.rig.store.tick()


def request(counted: Counted, what: str, prompt: str, used: int) -> dict[int, int]:
    """A request, and the tokens that its lease is to count, by the lease's id."""
    chain, store = make_chain(SPEC, prompt, tail=used), counted.rig.store
    first_block = min(used, len(chain))
    if what == "ask":
        known = store.acquire("r", chain)
        ask(counted, chain, used)
        return {known.id: chain.prompt_tokens}
    if what == "prefetch":
        store.release(store.acquire_uncounted(("", "p"), chain, first_block=first_block))
        return {}
    lease = store.acquire(f"{prompt}-{used}", chain, first_block=first_block)
    if what == "release":
        store.release(lease, hints=Hints(ended=True, priority=used))
    return {lease.id: chain.prompt_tokens - first_block * SPEC.block_size}


REQUESTS = ["ask", "ask", "ask", "hold", "hold", "release", "prefetch"]
OTHERS = ["write", "write", "probe", "forget", "clear", "lose", "damage", "wait"]
STEPS = st.tuples(
    st.sampled_from([*REQUESTS, *OTHERS]),
    st.sampled_from(PROMPTS),
    st.integers(0, 3),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=25))
def test_no_counter_falls_and_hits_and_misses_are_what_was_asked(steps: list[tuple[str, str, int]]) -> None:
    with counted_store(SPEC) as counted:
        laws, asked = Laws(counted.registry), dict[int, int]()
        for what, prompt, used in [*steps, ("wait", "", 0)]:
            if what in REQUESTS:
                asked |= request(counted, what, prompt, used)
            else:
                step(counted, what, prompt, used)
            laws.check()
        assert counted.registry.get_sample_value("kvstore_leases") == 0
        counts = samples_of(counted.registry)
        assert counts.get('kvstore_asked_tokens_total{model="tiny"}', 0) == sum(asked.values())


def test_ten_thousand_namespaces_make_no_more_series_than_fifty() -> None:
    """Each with a model of its own, all asked for, some with blocks."""
    clock, registry, spaces = FakeClock(), CollectorRegistry(), 10_000
    specs = [make_spec(f"model-{number}") for number in range(spaces)]
    names = {spec.root.digest: spec.namespace.model for spec in specs}
    with pool_folder() as folder:
        store = TieredStore(
            Tiers(make_host(Path(folder), clock)),
            clock=clock,
            listeners=(Metrics(registry, names.__getitem__),),
        )
        resident = {("host", model): 100 for model in names.values()}
        readings = readings_of(store)
        registry.register(StoreGauges(dataclasses.replace(readings, resident_bytes=lambda: resident)))
        for spec in specs:
            store.register(spec)
            store.release(store.acquire("r", make_chain(spec, "abc")))
        samples = [sample for family in registry.collect() for sample in family.samples]
        text, _ = render(registry, "")
        store.close()
    models = {sample.labels["model"] for sample in samples if "model" in sample.labels}
    assert len(models) <= 2 * MODELS_MAX + 1
    assert OTHER in models
    by_name = Counter(sample.name for sample in samples)
    assert by_name["kvstore_asked_tokens_total"] == by_name["kvstore_resident_bytes"] == MODELS_MAX + 1
    assert len(samples) < 400
    assert len(text) < 60_000
    asked = sum(each.value for each in samples if each.name == "kvstore_asked_tokens_total")
    assert asked == spaces * 12
    assert sum(each.value for each in samples if each.name == "kvstore_resident_bytes") == spaces * 100
    assert all(
        METRICS[name].kind is not Kind.HISTOGRAM for name in METRICS if "model" in METRICS[name].labels
    )
