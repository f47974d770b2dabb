"""What a server exports beside what events tell: calls, readings, and that all of it is in one table."""

from __future__ import annotations

import dataclasses
import time

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics import parser as openmetrics

from kvstore.block import WHOLE, MissCause, TierName
from kvstore.events import RequestSettled
from kvstore.metric_table import LIMITS_MAX, METRICS, OTHER, RPCS_MAX
from kvstore.metrics import Metrics, ServiceMetrics, StoreGauges, render
from kvstore.tiers.redis import RedisOptions, RedisTier
from tests.support.counted_store import counted_store, readings_of, run_script, samples_of
from tests.support.stores import make_chain, make_spec


def test_calls_are_counted_by_name_and_outcome() -> None:
    registry, clients = CollectorRegistry(), ["one"]
    service = ServiceMetrics(registry, version="1.2.3", clients=lambda: len(clients))
    service.rpc("Acquire", "ok", 0.002)
    service.rpc("Acquire", "ok", 0.004)
    service.rpc("Acquire", "not_found", 20.0)
    service.refused("leases")
    clients.append("another")
    assert samples_of(registry) == {
        'kvstore_rpc_seconds_count{rpc="Acquire",outcome="ok"}': 2,
        'kvstore_rpc_seconds_count{rpc="Acquire",outcome="not_found"}': 1,
        'kvstore_refused_requests_total{limit="leases"}': 1,
        "kvstore_clients{}": 2,
        'kvstore_build_info{version="1.2.3"}': 1,
    }
    ok = {"rpc": "Acquire", "outcome": "ok"}
    assert registry.get_sample_value("kvstore_rpc_seconds_sum", ok) == 0.006
    buckets = {"0.001": 0, "0.003": 1, "0.01": 2, "+Inf": 2}
    for bound, count in buckets.items():
        assert registry.get_sample_value("kvstore_rpc_seconds_bucket", {**ok, "le": bound}) == count


def test_names_of_calls_and_limits_are_bounded() -> None:
    """Whatever is called: a caller cannot make the server export without end."""
    registry = CollectorRegistry()
    service = ServiceMetrics(registry, version="1", clients=lambda: 0)
    for number in range(RPCS_MAX + 10):
        service.rpc(f"rpc {number}", "ok", 0.0)
        service.refused(f"limit {number}")
    counts = samples_of(registry)
    other_calls = f'kvstore_rpc_seconds_count{{rpc="{OTHER}",outcome="ok"}}'
    other_limits = f'kvstore_refused_requests_total{{limit="{OTHER}"}}'
    assert (counts[other_calls], counts[other_limits]) == (10, RPCS_MAX + 10 - LIMITS_MAX)
    assert len(counts) == RPCS_MAX + 1 + LIMITS_MAX + 1 + 1


def test_what_goes_wrong_with_redis_is_exported() -> None:
    """Nobody listens on the port: a call fails at once, and after three the node is given up."""
    registry, place = CollectorRegistry(), "127.0.0.1:1"
    redis = RedisTier(RedisOptions(f"redis://{place}", connect_timeout_seconds=5.0), time.monotonic)
    spec = make_spec("tiny")
    with counted_store(spec) as counted:
        readings = dataclasses.replace(
            readings_of(counted.rig.store),
            tiers=lambda: {TierName.REDIS: redis.status()},
            redis_errors=redis.errors,
            redis_breakers=redis.breakers,
            redis_queue_bytes=lambda: 4096,
            listener_failures=lambda: 7,
            background_failures=lambda: {"tick": 2},
        )
        registry.register(StoreGauges(readings))
        for healthy in (1, 1, 0):
            redis.match(make_chain(spec, "abc").rows(WHOLE), time.monotonic() + 30.0)
            assert registry.get_sample_value("kvstore_tier_healthy", {"tier": "redis"}) == healthy
            assert registry.get_sample_value("kvstore_redis_breaker_open", {"node": place}) == 1 - healthy
        assert registry.get_sample_value("kvstore_redis_errors_total", {"kind": "connection"}) == 3
        assert registry.get_sample_value("kvstore_redis_queue_bytes") == 4096
        assert registry.get_sample_value("kvstore_listener_failures_total") == 7
        assert registry.get_sample_value("kvstore_background_failures_total", {"task": "tick"}) == 2
    redis.close()


@pytest.fixture(name="scraped", scope="module")
def _scraped() -> dict[str, Metric]:
    """Families as a scraper reads them from a server on which everything has happened."""
    spec = make_spec("tiny")
    with counted_store(spec) as counted:
        service = ServiceMetrics(counted.registry, version="1", clients=lambda: 0)
        service.rpc("Acquire", "ok", 0.1)
        service.refused("leases")
        run_script(counted, spec)
        text, content_type = render(counted.registry, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = openmetrics.text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    return {family.name: family for family in families}


def test_the_table_is_what_is_exported(scraped: dict[str, Metric]) -> None:
    exported = {
        (family.name + "_total" if family.type == "counter" else family.name): (
            family.type,
            family.documentation,
        )
        for family in scraped.values()
    }
    assert exported == {name: (metric.kind, metric.help) for name, metric in METRICS.items()}


def test_labels_are_those_in_the_table(scraped: dict[str, Metric]) -> None:
    for name, metric in METRICS.items():
        for sample in scraped[name.removesuffix("_total")].samples:
            labels = {label: value for label, value in sample.labels.items() if label != "le"}
            assert labels.keys() == metric.labels.keys(), sample
            for label, value in labels.items():
                assert value in (metric.labels[label].closed or (value,)), sample


def test_who_does_not_ask_for_openmetrics_gets_the_text_format() -> None:
    registry = CollectorRegistry()
    Metrics(registry, lambda _: "model")(RequestSettled(1.0, b"", 1, miss_tokens={MissCause.COLD: 1}))
    text, content_type = render(registry, "")
    assert content_type.startswith("text/plain")
    assert 'kvstore_asked_tokens_total{model="model"} 1.0' in text.decode().splitlines()
