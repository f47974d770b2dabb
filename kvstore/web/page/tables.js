// What the page says in tables: why tokens were missed, whose bytes are stored, what Redis took and refused.

import { RECENT_SECONDS, ratio } from "./counts.js";
import { at, element, put, shape } from "./dom.js";
import { bytes, percent, recentName, whole } from "./format.js";
import { ASKED, MISS, POOL } from "./names.js";

const MEANINGS = {
  cold: "nobody stored these tokens after this prefix",
  evicted: "they were stored, and left for want of room",
  expired: "they were stored, and their time was over",
  tail: "past the last whole block that a caller may use",
  collision: "another prompt has the same hash",
  corrupt: "a checksum was wrong: not served",
  stale: "they left between the promise and the copy",
  version: "stored by another version of the format",
  timeout: "Redis did not answer in time",
  unavailable: "Redis could not be asked",
  slower: "to load them from Redis would take longer than to compute them",
  quota: "there was no room for them beside what is leased",
  unknown: "the reason is not known",
};

function bar(share, hue) {
  const svg = shape("svg", { "aria-hidden": "true" });
  svg.append(
    shape("rect", { class: `bar ${hue}`, width: `${(100 * share).toFixed(2)}%`, height: "100%", rx: 2 }),
  );
  const cell = element("td", { class: "bars" });
  cell.append(svg);
  return cell;
}

function heading(name, meaning = "") {
  return element("th", { scope: "row" }, name, ...(meaning ? [element("small", {}, meaning)] : []));
}

function cell(text) {
  return element("td", {}, text);
}

function fill(id, rows, reason) {
  at(id).hidden = rows.length === 0;
  put(`${id.split("-")[0]}-empty`, rows.length ? "" : reason);
  at(id).tBodies[0].replaceChildren(...rows);
}

export function showMisses(counts) {
  const begin = counts.begin(RECENT_SECONDS);
  const asked = counts.growth(begin, counts.latest, ASKED);
  put("misses-recent", recentName(begin, RECENT_SECONDS));
  const causes = counts
    .labelValuesNow(MISS, "cause")
    .map((cause) => ({
      cause,
      recent: counts.growth(begin, counts.latest, MISS, { cause }),
      ever: counts.now(MISS, { cause }),
    }))
    .sort((a, b) => b.recent - a.recent || b.ever - a.ever);
  const rows = causes.map(({ cause, recent, ever }) =>
    element(
      "tr",
      { "data-cause": cause },
      heading(cause, MEANINGS[cause]),
      cell(asked > 0 ? `${whole(recent)} · ${percent(recent / asked)}` : whole(recent)),
      bar(ratio(recent, asked) ?? 0, "blue"),
      cell(whole(ever)),
    ),
  );
  fill("misses", rows, counts.now(ASKED) ? "no misses yet" : "no requests yet");
}

export function showNamespaces(counts, live) {
  const stored = counts.now(POOL, { state: "ready" });
  const rows = live.namespaces.map((each) =>
    element(
      "tr",
      {},
      heading(each.model || "not registered since the start"),
      cell(bytes(each.bytes)),
      bar(Math.min(1, ratio(each.bytes, stored) ?? 0), "blue"),
      cell(whole(each.blocks)),
      cell(whole(each.block_size)),
    ),
  );
  fill("namespaces", rows, "nothing stored yet");
}

export function showRedis(counts, live) {
  const begin = counts.begin(RECENT_SECONDS);
  const counted = (title, name, label, extra = {}) =>
    counts.labelValues(name, label).map((value) => {
      const wanted = { ...extra, [label]: value };
      return [
        `${title} ${value}`,
        counts.growth(begin, counts.latest, name, wanted),
        counts.now(name, wanted),
      ];
    });
  const nodes = counts
    .labelValuesNow("kvstore_redis_breaker_open", "node")
    .map((node) =>
      element(
        "tr",
        {},
        heading(node),
        cell(counts.now("kvstore_redis_breaker_open", { node }) ? "given up, tried now and then" : "answers"),
        cell(""),
      ),
    );
  const numbers = [
    ...counted("errors:", "kvstore_redis_errors_total", "kind"),
    ...counted("blocks not stored:", "kvstore_dropped_blocks_total", "cause", { tier: "redis" }),
    ...counted("blocks stored,", "kvstore_stored_blocks_total", "tier").filter(([title]) =>
      title.endsWith("redis"),
    ),
  ].filter(([, , ever]) => ever !== null);
  const rows = nodes.length
    ? [
        ...nodes,
        ...numbers.map(([title, recent, ever]) =>
          element("tr", {}, heading(title), cell(whole(recent)), cell(whole(ever))),
        ),
      ]
    : [];
  fill(
    "redis-table",
    rows,
    live.tiers.redis?.healthy === false ? live.tiers.redis.reason : "no Redis in use",
  );
}
