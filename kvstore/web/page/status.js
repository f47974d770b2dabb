// The page: asks the server for its counts, and shows them. Figures are those of /metrics.

import { Curve, TimeChart } from "./charts.js";
import { Counts, RECENT_SECONDS, ratio } from "./counts.js";
import { at, put } from "./dom.js";
import { bytes, bytesRate, clock, duration, percent, rate, recentName, short, whole } from "./format.js";
import { ASKED, EVICTED, HIT, MOVED, POOL, WHAT_IF_ASKED, WHAT_IF_BYTES, WHAT_IF_MISSED } from "./names.js";
import { showMisses, showNamespaces, showRedis } from "./tables.js";

const POLL_MS = 2000;
const PATIENCE_MS = 1500;
const HISTORY_PATIENCE_MS = 5000;
const HISTORY_HOLE_MS = 30_000;
const TRAILING_SECONDS = 60;

const TIER_HUES = { device: "violet", host: "blue", redis: "amber" };
const CAUSE_HUES = { capacity: "blue", reclaimed: "teal", expired: "amber", cleared: "violet", corrupt: "red" };
const PATH_HUES = {
  "caller to host": "blue",
  "host to caller": "teal",
  "host to redis": "amber",
  "redis to host": "violet",
};
const counts = new Counts();
const charts = {
  hits: new TimeChart(at("hits"), percent),
  occupancy: new TimeChart(at("occupancy"), bytes),
  evictions: new TimeChart(at("evictions"), (value) =>
    value === null ? rate(null) : `${short(value)} blocks/s`,
  ),
  transfers: new TimeChart(at("transfers"), bytesRate),
  whatIf: new Curve(at("what-if"), percent),
};
let live = null;
let answered = null;
let remembered = false;

// -- figures ------------------------------------------------------------------------------------------

function showFigures() {
  const begin = counts.begin(RECENT_SECONDS);
  const asked = counts.now(ASKED) ?? 0;
  const hit = counts.now(HIT) ?? 0;
  const recentAsked = counts.growth(begin, counts.latest, ASKED);
  const recentHit = counts.growth(begin, counts.latest, HIT);
  const recent = recentName(begin, RECENT_SECONDS);
  if (asked === 0) {
    words("hit-share", "no requests yet");
    put("hit-share-since", "");
    words("spared", "no requests yet");
    put("spared-since", "");
  } else {
    if (recentAsked > 0) figure("hit-share", percent(recentHit / recentAsked));
    else words("hit-share", "no requests");
    put(
      "hit-share-since",
      `${recent} · since start ${percent(hit / asked)}: ${whole(hit)} of ${whole(asked)} tokens`,
    );
    figure("spared", short(hit));
    put("spared-since", `since start · ${whole(recentHit)} in the ${recent}`);
  }
  showMemory();
  showRedisFigure();
}

function showMemory() {
  const ready = counts.now(POOL, { state: "ready" });
  const reserved = counts.now(POOL);
  const leased = counts.now("kvstore_leased_bytes");
  const unread = counts.now("kvstore_unread_bytes");
  figure("pool", percent(ratio(ready ?? 0, reserved)));
  put("pool-parts", `${bytes(ready)} stored of ${bytes(reserved)}`);
  if (ready > 0) figure("unread", percent(unread === null ? null : Math.min(1, unread / ready)));
  else words("unread", "nothing stored yet");
  put("unread-bytes", ready > 0 ? `${bytes(unread)} of ${bytes(ready)}` : "");
  figure("leases", whole(counts.now("kvstore_leases")));
  put("leased-bytes", `${bytes(leased)} cannot be evicted · ${whole(counts.now("kvstore_clients"))} clients`);
}

function showRedisFigure() {
  const tier = live.tiers.redis;
  const nodes = counts.labelValuesNow("kvstore_redis_breaker_open", "node");
  const used = nodes.length > 0 || (tier && !tier.healthy);
  words("redis", !tier ? "not known" : !tier.healthy ? "does not answer" : used ? "answers" : "not in use");
  at("redis").classList.toggle("bad", Boolean(tier && !tier.healthy));
  const queue = counts.now("kvstore_redis_queue_bytes");
  put(
    "redis-says",
    [tier?.reason, used ? `${bytes(queue)} wait to be stored` : ""].filter(Boolean).join(" · "),
  );
}

function figure(id, text) {
  at(id).classList.remove("text");
  put(id, text);
}

function words(id, text) {
  at(id).classList.add("text");
  put(id, text);
}

// -- over time ----------------------------------------------------------------------------------------

function span() {
  return Number(document.querySelector("input[name=span]:checked").value);
}

function showCharts() {
  const seconds = span();
  const samples = counts.recent(seconds + TRAILING_SECONDS);
  const befores = counts.trailing(samples, TRAILING_SECONDS);
  const first = samples.findIndex((sample) => sample.at >= counts.latest.at - seconds * 1000);
  const shown = samples.slice(first);
  const frame = {
    times: shown.map((sample) => sample.at),
    instances: shown.map((sample) => sample.instance),
    span: [counts.latest.at - seconds * 1000, counts.latest.at],
  };
  const cut = (values) => values.slice(first);

  const share = (tier) =>
    cut(
      samples.map((sample, place) => {
        if (befores[place] === null) return null;
        const asked = counts.growth(befores[place], sample, ASKED);
        return asked > 0 ? counts.growth(befores[place], sample, HIT, { tier }) / asked : null;
      }),
    );
  const speed = (name, wanted) =>
    cut(
      samples.map((sample, place) => {
        const before = befores[place];
        return before && (1000 * counts.growth(before, sample, name, wanted)) / (sample.at - before.at);
      }),
    );

  const tiers = counts
    .labelValues(HIT, "tier")
    .map((tier) => ({ name: tier, hue: TIER_HUES[tier] ?? "grey", values: share(tier) }));
  const anyShare = tiers.some((each) => each.values.some((value) => value !== null));
  const noHits = counts.now(ASKED) ? "no hits yet" : "no requests yet";
  charts.hits.show(
    anyShare ? { ...frame, series: tiers, stacked: true, bound: 1 } : null,
    tiers.length ? "no requests in this time" : noHits,
  );

  charts.occupancy.show({ ...frame, series: occupancy(shown), stacked: true, bound: counts.now(POOL) || 1 });

  const causes = counts
    .labelValues(EVICTED, "cause")
    .map((cause) => ({ name: cause, hue: CAUSE_HUES[cause] ?? "grey", values: speed(EVICTED, { cause }) }));
  charts.evictions.show(
    causes.length ? { ...frame, series: causes, stacked: true } : null,
    "nothing evicted yet",
  );
  charts.transfers.show(
    paths().length
      ? {
          ...frame,
          unit: 1024,
          series: paths().map((path) => ({ ...path, values: speed(MOVED, path.labels) })),
        }
      : null,
    "nothing copied yet",
  );
}

function occupancy(samples) {
  const state = (name) => samples.map((sample) => counts.sum(sample, POOL, { state: name }));
  const leased = samples.map((sample) => counts.sum(sample, "kvstore_leased_bytes"));
  const evictable = state("ready").map((ready, place) =>
    ready === null ? null : Math.max(0, ready - (leased[place] ?? 0)),
  );
  return [
    { name: "leased", hue: "violet", values: leased },
    { name: "stored, not leased", hue: "blue", values: evictable },
    { name: "being written", hue: "amber", values: state("staged") },
    { name: "quarantined", hue: "red", values: state("quarantined") },
  ];
}

function paths() {
  const found = [];
  for (const from of counts.labelValues(MOVED, "from")) {
    for (const to of counts.labelValues(MOVED, "to")) {
      const labels = { from, to };
      const name = `${from} to ${to}`;
      if (counts.now(MOVED, labels) !== null) found.push({ name, labels, hue: PATH_HUES[name] ?? "grey" });
    }
  }
  return found;
}

function showWhatIf() {
  const points = counts
    .labelValues(WHAT_IF_BYTES, "scale")
    .map((scale) => ({
      scale: Number(scale),
      asked: counts.now(WHAT_IF_ASKED, { scale }),
      missed: counts.now(WHAT_IF_MISSED, { scale }),
      size: bytes(counts.now(WHAT_IF_BYTES, { scale })),
    }))
    .filter((point) => point.asked > 0)
    .sort((a, b) => a.scale - b.scale)
    .map(({ scale, asked, missed, size }) => ({
      scale,
      value: Math.max(0, 1 - missed / asked), // misses are an estimate
      label: scale === 1 ? `this size, ${size}` : `×${scale}, ${size}`,
    }));
  at("what-if-section").hidden = points.length < 2;
  if (points.length >= 2) charts.whatIf.show({ points });
}

// -- asking -------------------------------------------------------------------------------------------

// What the server answers; null where it does not, which is nothing but a reason to ask again.
async function answerTo(path, patience) {
  try {
    const reply = await fetch(path, { signal: AbortSignal.timeout(patience) });
    return reply.ok ? await reply.json() : null;
  } catch {
    return null;
  }
}

function showState(lost) {
  if (live === null) {
    put("state", lost ? "no answer yet; trying again" : "connecting");
    return;
  }
  at("state").dataset.state = lost ? "lost" : live.state;
  put("state", lost ? `no answer since ${clock(answered)}; trying again` : live.state);
  put("version", live.version);
  put("age", `up ${duration(live.uptime_seconds)} · as of ${clock(answered)}`);
}

function show() {
  showFigures();
  showCharts();
  showMisses(counts);
  showWhatIf();
  showNamespaces(counts, live);
  showRedis(counts, live);
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

async function ask() {
  if (answered !== null && Date.now() - answered > HISTORY_HOLE_MS) remembered = false;
  if (!remembered) {
    const history = await answerTo("/history.json", HISTORY_PATIENCE_MS);
    if (history) counts.load(history, Date.now());
    remembered = history !== null;
  }
  const found = await answerTo("/live.json", PATIENCE_MS);
  if (found) {
    live = found;
    answered = Date.now();
    counts.push(live, answered);
    show();
  }
  showState(found === null);
}

function poll() {
  ask().finally(() => setTimeout(poll, POLL_MS));
}

at("span").addEventListener("change", () => {
  if (live) showCharts();
});
poll();
