"""The live page in a real browser: what a person reads is what was counted, and anybody can read it."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.chromium import Tab, chromium_tab
from tests.support.sidecars import Sidecar, sidecar
from tests.support.stubs import Raw, dialled, spec, tokens_of
from tests.support.valkey import ValkeyServer, eventually, shared_valkey, valkey

__all__ = ["shared_valkey", "valkey"]

PROMPT = tokens_of(8, tail=3)
HOSTILE = "<img src=x onerror=alert(1)>"
DRAWN = "document.body?.dataset.drawn"
AA_TEXT, AA_LARGE, AA_GRAPHICS = 4.5, 3.0, 3.0

CONTRASTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (color) => {
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((p) => (p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/rgba\\(.*, 0\\)|transparent/.test(color)) return color;
    }
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {
    if (!node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const says = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (says) {
      const large = parseFloat(style.fontSize) >= 24;
      found.push([large ? "large" : "text", contrast(node.ownerSVGElement ? style.fill : style.color, behind(node)), node.outerHTML.slice(0, 60)]);
    }
    if (node.matches(".key, .line, .bar, .dot")) found.push(["graphics", contrast(style.color, behind(node.parentElement)), node.outerHTML.slice(0, 60)]);
  }
  return found;
})()"""  # noqa: E501

NAMELESS = """[
  ...[...document.querySelectorAll("svg[role=img]")].filter((svg) => svg.checkVisibility() && !svg.getAttribute("aria-label")),
  ...[...document.querySelectorAll("input")].filter((input) => !input.labels[0]?.innerText),
  ...[...document.querySelectorAll("section")].filter((section) => !(section.ariaLabel || document.getElementById(section.getAttribute("aria-labelledby"))?.innerText)),
  ...[...document.querySelectorAll("thead th")].filter((cell) => !(cell.innerText || cell.ariaLabel || !cell.checkVisibility())),
  ...[...document.querySelectorAll("tbody tr")].filter((row) => !row.querySelector("th[scope=row]")),
].map((node) => node.outerHTML)"""  # noqa: E501


FEWER_SAMPLES = """(async () => {
  const { TimeChart } = await import("/charts.js");
  const figure = document.querySelector("main").appendChild(document.createElement("figure"));
  figure.append(document.createElement("figcaption"));
  const chart = new TimeChart(figure, String);
  const show = (count) => {
    const times = [...Array(count).keys()];
    const values = times.map((time) => time + 1);
    const series = [{ name: "a", hue: "blue", values }];
    chart.show({ times, instances: times.map(() => "i"), span: [0, 9], series });
  };
  show(9);
  chart.move(8);
  show(3);
  const drawn = figure.outerHTML;
  figure.remove();
  return drawn;
})()"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def totals(server: Sidecar, name: str, label: str) -> dict[str, int]:
    """Values of a metric by one label, all others together, from /metrics."""
    with urllib.request.urlopen(f"{server.serving['http']}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, int] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == name:
                value = sample.labels.get(label, "")
                found[value] = found.get(value, 0) + int(sample.value)
    return found


def work(raw: Raw, model: str) -> None:
    """Hits, and misses of three causes."""
    peer = raw.register(spec(model))
    peer.write(PROMPT)
    for number in range(3):
        peer.release(peer.hold(PROMPT, f"all-{number}"))
    peer.release(peer.hold(PROMPT, "some"), 5)
    peer.acquire(tokens_of(4, seed=3), "cold")


@pytest.fixture(scope="module")
def server() -> Iterator[Sidecar]:
    with sidecar(pool_bytes="4MiB", http_listen=f"127.0.0.1:{free_port()}") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with chromium_tab() as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, server: Sidecar) -> Tab:
    """The page, drawn once, in a window of a usual size."""
    browser.resize(1200, 900)
    browser.scheme("light")
    browser.open(server.serving["http"])
    browser.await_true(DRAWN)
    browser.errors.clear()
    return browser


def reload(tab: Tab) -> None:
    """The page anew, with the figures of now."""
    tab.open(tab.evaluate("location.href"))
    tab.await_true(f"{DRAWN} === '1'")


def redrawn(tab: Tab) -> None:
    """Wait until the page itself has asked from now on: the second drawing from here."""
    before = int(tab.evaluate(DRAWN))
    tab.await_true(f"{DRAWN} >= {before + 2}")


def test_nothing_has_been_asked_yet_is_not_zero_percent(tab: Tab) -> None:
    for selector in ("#hit-share", "#spared", "#hits .empty", "#misses-empty"):
        assert tab.text(selector) == "no requests yet"
    assert tab.text("#unread") == "nothing stored yet"
    assert tab.text("#redis") == "not in use"
    assert tab.text("#state") == "serving"
    assert tab.errors == []


def test_figures_are_those_of_metrics_and_status(tab: Tab, server: Sidecar) -> None:
    with dialled(server.address) as raw:
        work(raw, "m")
        lease = raw.register(spec("m")).hold(PROMPT, "held")
        redrawn(tab)
        status = raw.status()
    asked = totals(server, "kvstore_asked_tokens_total", "")[""]
    hits = totals(server, "kvstore_hit_tokens_total", "tier")
    misses = totals(server, "kvstore_miss_tokens_total", "cause")
    assert (asked, sum(hits.values())) == (status.asked_tokens, sum(status.hit_tokens.values()))
    assert asked == sum(hits.values()) + sum(misses.values())
    said = f"last 5 min · since start {hits['host'] / asked:.1%}: {hits['host']} of {asked} tokens"
    assert tab.text("#hit-share-since") == said.replace("%", " %")
    assert tab.text("#hit-share") == f"{100 * hits['host'] / asked:.1f} %"
    assert tab.text("#spared") == f"{hits['host']}"
    shown = tab.evaluate(
        "[...document.querySelectorAll('#misses tbody tr')].map((row) => "
        "[row.dataset.cause, Number(row.cells[3].innerText.replaceAll(',', ''))])"
    )
    assert dict(shown) == misses
    ready = totals(server, "kvstore_pool_bytes", "state")["ready"]
    assert tab.text("#pool-parts") == f"{ready // 1024} KiB stored of 4 MiB"
    assert tab.text("#leases") == "1"
    assert tab.errors == []
    with dialled(server.address) as raw:
        raw.register(spec("m")).release(lease)


def test_what_if_is_that_of_metrics(tab: Tab, server: Sidecar) -> None:
    scales = ("0.25", "0.5", "1", "2", "4")

    def counted() -> list[list[str]]:
        asked, missed, size = (
            totals(server, f"kvstore_whatif_{name}", "scale")
            for name in ("asked_tokens_total", "missed_tokens_total", "capacity_bytes")
        )
        named = {scale: f"×{scale}, {size[scale] >> 20} MiB" for scale in scales} | {"1": "this size, 4 MiB"}
        return [[named[scale], f"{100 * (1 - missed[scale] / asked[scale]):.1f} %"] for scale in scales]

    def shown() -> list[list[str]]:
        reload(tab)
        tab.evaluate("document.querySelector('#what-if details').open = true")
        tab.await_true("document.querySelectorAll('#what-if tbody tr').length === 5")
        found: list[list[str]] = tab.evaluate(
            "[...document.querySelectorAll('#what-if tbody tr')].map((row) => "
            "[row.cells[0].innerText, row.cells[1].innerText])"
        )
        return found

    with dialled(server.address) as raw:
        work(raw, "m")
    # The pools of other sizes follow a moment later.
    assert eventually(lambda: shown() == counted()), (shown(), counted())


def test_names_are_shown_as_text(tab: Tab, server: Sidecar) -> None:
    """A model is called what a client calls it."""
    with dialled(server.address) as raw:
        raw.register(spec(HOSTILE)).write(PROMPT)
    reload(tab)
    assert HOSTILE in tab.text("#namespaces")
    assert tab.evaluate("document.images.length") == 0
    assert tab.errors == []


def test_nothing_comes_from_elsewhere(tab: Tab) -> None:
    foreign = "performance.getEntriesByType('resource').filter((each) => !each.name.startsWith(origin))"
    assert tab.evaluate(f"{foreign}.length") == 0
    assert tab.evaluate("performance.getEntriesByType('resource').length") >= 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(tab: Tab, server: Sidecar, scheme: str) -> None:
    with dialled(server.address) as raw:
        work(raw, "m")
    tab.scheme(scheme)
    reload(tab)
    tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = tab.evaluate(CONTRASTS)
    limits = {"text": AA_TEXT, "large": AA_LARGE, "graphics": AA_GRAPHICS}
    assert {kind for kind, _, _ in found} == set(limits)
    assert [each for each in found if each[1] < limits[each[0]]] == []
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(251, 251, 250)" if scheme == "light" else "rgb(18, 21, 25)"
    )


def test_everything_has_a_name(tab: Tab) -> None:
    reload(tab)
    tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert tab.evaluate(NAMELESS) == []
    assert tab.evaluate("document.documentElement.lang") == "en"
    said = tab.evaluate("document.querySelector('#hits svg').getAttribute('aria-label')")
    assert said.startswith("Hit tokens by tier, share of asked tokens, trailing minute. Last 15 min. host: ")


def test_the_keyboard_reaches_everything(tab: Tab) -> None:
    """The time shown, then each chart: its values are read by arrows, and said."""
    reload(tab)
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.value") == "900"
    assert tab.evaluate("getComputedStyle(document.activeElement.nextElementSibling).outlineStyle") == "solid"
    tab.press("ArrowLeft")
    assert tab.evaluate("document.querySelector('input:checked').value") == "300"
    assert "Last 5 min." in tab.evaluate("document.querySelector('#hits svg').getAttribute('aria-label')")
    reached = []
    for _ in range(20):
        tab.press("Tab")
        reached.append(
            tab.evaluate("document.activeElement.closest('figure')?.id ?? document.activeElement.tagName")
        )
        if tab.evaluate("document.activeElement.matches('#occupancy svg')"):
            assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            tab.press("Home")
            tab.press("ArrowRight")
            assert "stored, not leased" in tab.text("#occupancy .spoken")
            assert tab.text("#occupancy .when").startswith("at ")
            tab.press("Escape")
            assert tab.text("#occupancy .when") == "now"
    assert {"hits", "occupancy", "A"} <= set(reached)
    assert tab.errors == []


def test_the_cursor_stays_among_what_is_shown(tab: Tab) -> None:
    """It is on the last sample when samples fall out of the time shown."""
    drawn = tab.evaluate(FEWER_SAMPLES)
    assert "<b>3</b>" in drawn
    assert [word for word in ("NaN", "undefined") if word in drawn] == []


@pytest.mark.parametrize("width", [320, 390, 1600])
def test_no_width_scrolls_sideways(tab: Tab, width: int) -> None:
    tab.resize(width, 844)
    reload(tab)
    tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.redis
def test_redis_is_shown_with_what_it_took(browser: Tab, valkey: ValkeyServer) -> None:
    """And not any more when the server has none."""
    place = {"pool_bytes": "4MiB", "http_listen": f"127.0.0.1:{free_port()}"}
    with sidecar(redis_url=valkey.url, **place) as server, dialled(server.address) as raw:
        raw.register(spec("m")).write(PROMPT)
        assert eventually(lambda: valkey.client.dbsize() == 8)
        browser.open(server.serving["http"])
        browser.await_true(DRAWN)
        assert browser.text("#redis") == "answers"
        rows = [line.split("\t") for line in browser.text("#redis-table tbody").splitlines()]
        assert [f"127.0.0.1:{valkey.port}", "answers"] in [row[:2] for row in rows]
        assert ["blocks stored, redis", "8", "8"] in rows
        assert "host to redis" in browser.text("#transfers .legend")
    with sidecar(**place):
        browser.await_true("document.querySelector('#redis').innerText === 'not in use'")
        assert browser.text("#redis-empty") == "no Redis in use"


def test_a_reload_shows_the_past(tab: Tab, server: Sidecar) -> None:
    def remembered() -> int:
        with urllib.request.urlopen(f"{server.serving['http']}/history.json", timeout=10) as answer:
            return len(json.load(answer)["ages_seconds"])

    assert eventually(lambda: remembered() >= 2, 20)
    reload(tab)
    points = (
        "Math.max(...[...document.querySelectorAll('#occupancy .line')].map((each) => each.points.length))"
    )
    assert tab.evaluate(points) >= 3


def test_a_restart_is_a_gap_and_the_page_goes_on(tab: Tab, server: Sidecar) -> None:
    with dialled(server.address) as raw:
        work(raw, "m")
    redrawn(tab)
    lines = "document.querySelectorAll('#occupancy .line.blue').length"
    whole = int(tab.evaluate(lines))
    server.kill()
    tab.await_true("document.querySelector('#state').dataset.state === 'lost'")
    assert tab.text("#state").startswith("no answer since ")
    assert tab.text("#spared") != "no requests yet", "what was known is still shown"
    server.start()
    tab.await_true("document.querySelector('#state').innerText === 'serving'")
    assert tab.text("#hit-share") == "no requests yet"
    with ExitStack() as opened:
        work(opened.enter_context(dialled(server.address)), "m")
        redrawn(tab)
    asked = totals(server, "kvstore_asked_tokens_total", "")[""]
    hit = totals(server, "kvstore_hit_tokens_total", "")[""]
    assert tab.text("#hit-share-since").endswith(f": {hit} of {asked} tokens")
    assert tab.evaluate(lines) > whole, "one before the restart, one after it"
    refused = [text for text in tab.errors if "ERR_CONNECTION_REFUSED" not in text]
    assert refused == []
