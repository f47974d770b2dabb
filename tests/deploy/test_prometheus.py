"""Rules, alerts and the dashboard: names that exist, rules that say what they should, a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.metric_table import METRICS, Kind
from tests.support.deployed import (
    GRAFANA,
    PROMETHEUS,
    REPOSITORY,
    compose_services,
    documents,
    free_port,
)
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import dialled, spec, tokens_of
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, valkey

__all__ = ["shared_valkey", "valkey"]

RULES = PROMETHEUS / "rules.yml"
RULE_TESTS = Path(__file__).with_name("rules_test.yml")
TARGET_LABELS = {"job", "instance", "le"}
GRAFANA_NAMES = {
    "$job": ".*",
    "$instance": ".*",
    "$model": ".*",
    "$__rate_interval": "4s",
    "$__range": "1m",
}
WAIT_SECONDS = 40.0
PROMPT = tokens_of(8, tail=3)


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}; Debian's package prometheus has it")
    return found


def promtool(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    return [rule for group in documents(RULES)[0]["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((GRAFANA / "dashboards/kvstore.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = dashboard["panels"]
    return found


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def told(expression: str) -> str:
    """As Grafana sends it."""
    for name, value in GRAFANA_NAMES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


# -- files ----------------------------------------------------------------------------------------------


def test_promtool_accepts_configuration_and_rules() -> None:
    assert promtool("check", "config", PROMETHEUS / "prometheus.yml")[0] == 0
    status, said = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert status == 0, said


def test_rules_say_what_they_should() -> None:
    status, said = promtool("test", "rules", RULE_TESTS)
    assert status == 0, said


def test_every_rule_is_tested() -> None:
    tested = RULE_TESTS.read_text(encoding="utf-8")
    unnamed = [name for rule in rules() if (name := str(rule.get("alert") or rule["record"])) not in tested]
    # What the alerts rest on is tested with them.
    rest = "\n".join(rule["expr"] for rule in rules() if "alert" in rule)
    assert [name for name in unnamed if name not in rest] == []


def test_every_alert_names_its_section_and_no_two_are_called_the_same() -> None:
    guide = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", guide, re.MULTILINE)
    }
    alerts = [rule for rule in rules() if "alert" in rule]
    linked = {rule["annotations"]["runbook"].partition("#")[::2] for rule in alerts}
    assert {page for page, _ in linked} == {"docs/operations.md"}
    assert {anchor for _, anchor in linked} <= anchors
    assert [rule["alert"] for rule in alerts if f"`{rule['alert']}`" not in guide] == []
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    assert [rule["alert"] for rule in alerts if not rule["annotations"]["summary"]] == []


def metric_labels() -> dict[str, set[str]]:
    """Every series name of the table, and its labels."""
    known: dict[str, set[str]] = {}
    for name, metric in METRICS.items():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        known |= {f"{name}{suffix}": set(metric.labels) | TARGET_LABELS for suffix in suffixes}
    return known


@pytest.mark.parametrize("where", ["rules", "dashboard"])
def test_metrics_and_labels_are_those_of_the_table(where: str) -> None:
    expressions = dashboard_expressions() if where == "dashboard" else [rule["expr"] for rule in rules()]
    known = metric_labels()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in expressions:
        assert set(re.findall(r"\w+:\w+:\w+", expression)) <= recorded, expression
        names = set(re.findall(r"(?<![:\w])(?:kvstore|prefill)_\w+", expression))
        assert names <= set(known), f"{names - set(known)} in {expression}"
        if where == "dashboard" and names:
            grouped = re.findall(r"\bby \(([^)]*)\)", expression)
            matched = re.findall(r"(\w+)=~?\"", expression)
            labels = {label.strip() for group in grouped for label in group.split(",")} | set(matched)
            assert labels <= set.union(*(known[name] for name in names)), expression
        assert names or ":" in expression or "up{" in expression or expression.startswith("up")


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    shown = panels()
    assert len({panel["id"] for panel in shown}) == len(shown)
    cells = [
        (x, y)
        for panel in shown
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} <= set(range(24))
    assert [panel["title"] for panel in shown if panel["type"] != "row" and not panel["targets"]] == []


def test_the_page_draws_metrics_of_the_table() -> None:
    page = "".join(
        path.read_text(encoding="utf-8") for path in (REPOSITORY / "kvstore/web/page").glob("*.js")
    )
    named = set(re.findall(r"\bkvstore_\w+", page))
    assert named <= set(METRICS)
    assert len(named) > 10


# -- a real Prometheus ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prometheus:
    """Scrapes one server each second."""

    url: str

    def api(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Values by labels, without those of the target."""
        return {
            tuple(
                sorted((k, v) for k, v in each["metric"].items() if k not in {"__name__", *TARGET_LABELS})
            ): float(each["value"][1])
            for each in self.api("query", query=expression)["result"]
        }

    def has(self, expression: str) -> bool:
        return self.query(expression) != {}

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """Started as the compose file starts it, with its configuration; the target is ours, and time short."""
    port = free_port()
    configuration = folder / "prometheus.yml"
    text = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
    assert text.count("kvstore:9470") == 1
    configuration.write_text(text.replace("kvstore:9470", target).replace("15s", "1s"))
    shutil.copy(RULES, folder)
    arguments = [
        argument.replace("/etc/prometheus/prometheus.yml", str(configuration)).replace(
            "=/prometheus", f"={folder}/data"
        )
        for argument in compose_services()["prometheus"]["command"]
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program("prometheus"), *arguments, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdout=log,
            stderr=log,
        )
    try:
        served = Prometheus(f"http://127.0.0.1:{port}")
        ready = eventually(served.answers, WAIT_SECONDS)
        assert ready, (folder / "log").read_text()
        yield served
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def work(server: Sidecar, turn: int) -> None:
    """Hits, misses, and so many blocks that earlier ones are evicted."""
    with dialled(server.address) as raw:
        peer = raw.register(spec("m"))
        peer.write(PROMPT)
        peer.look_up(PROMPT)
        for number in range(3):
            peer.release(peer.hold(PROMPT, f"{turn}-{number}"))
        for seed in range(6):
            peer.write(tokens_of(24, seed=10 * turn + seed))
        cold = peer.acquire(tokens_of(4, seed=10 * turn + 9), "cold")
        if cold.lease_id:
            peer.release(cold.lease_id)


@pytest.fixture(scope="module")
def server(shared_valkey: ValkeyServer) -> Iterator[Sidecar]:
    """With a Redis, and a pool so small that blocks are evicted."""
    with sidecar(pool_bytes="128KiB", extent_bytes="64KiB", redis_url=shared_valkey.url) as server:
        yield server


@pytest.fixture(scope="module")
def watching(server: Sidecar, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen counters of the server grow."""
    work(server, 1)
    target = server.serving["http"].removeprefix("http://")
    with prometheus(target, tmp_path_factory.mktemp("prometheus")) as served:
        seen = eventually(partial(served.has, "kvstore_asked_tokens_total"), WAIT_SECONDS)
        assert seen, served.api("targets")
        work(server, 2)
        for grown in ("job:kvstore_hit_tokens:ratio_rate5m", "rate(kvstore_evicted_blocks_total[4s])"):
            assert eventually(partial(served.has, grown), WAIT_SECONDS), grown
        yield served


@pytest.mark.redis
def test_the_counts_arrive(server: Sidecar, watching: Prometheus) -> None:
    with dialled(server.address) as raw:
        status = raw.status()

    def arrived() -> bool:
        hits = watching.query("sum by (tier) (kvstore_hit_tokens_total)")
        return {dict(labels)["tier"]: value for labels, value in hits.items()} == dict(status.hit_tokens)

    assert eventually(arrived, WAIT_SECONDS)
    assert watching.query("up") == {(): 1}
    assert watching.query("kvstore_asked_tokens_total") == {(("model", "m"),): status.asked_tokens}
    [share] = watching.query("job:kvstore_hit_tokens:ratio_rate5m").values()
    assert 0 < share < 1


@pytest.mark.redis
def test_every_rule_is_evaluated_and_a_server_that_is_well_raises_no_alarm(watching: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        groups = watching.api("rules")["groups"]
        return [rule for group in groups for rule in group["rules"] if rule["health"] != "unknown"]

    assert eventually(lambda: len(evaluated()) == len(rules()), WAIT_SECONDS)
    assert [rule["name"] for rule in evaluated() if rule["health"] != "ok"] == []
    assert watching.query("ALERTS") == {}


@pytest.mark.redis
def test_every_panel_is_answered(watching: Prometheus) -> None:
    """Without an error; and those about what has happened here, with values."""
    now = time.time()
    empty = []
    for expression in dashboard_expressions():
        found = watching.api(
            "query_range", query=told(expression), start=str(now - 20), end=str(now), step="1"
        )
        if not found["result"]:
            empty.append(set(re.findall(r"(?:kvstore|prefill)_\w+", expression)))
    may_be_empty = {"kvstore_refused_requests_total", "kvstore_dropped_blocks_total"}
    may_be_empty |= {name for name in metric_labels() if "reuse_gap" in name or "redis_errors" in name}
    may_be_empty |= {"kvstore_background_failures_total", "kvstore_skipped_requests_total"}
    assert [names for names in empty if not names <= may_be_empty] == []
