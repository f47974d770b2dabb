// What the server has counted, now and in the last hour. All differences are between samples of one
// instance of the server: after a restart counters begin at zero, and nothing is said across that.

export const RECENT_SECONDS = 300;
const KEEP_MS = 3_600_000;
const SPACING_MS = 4_900;

function matches(labels, wanted) {
  return Object.entries(wanted).every(([name, value]) => labels[name] === value);
}

// The share of a whole; null where there is no whole.
export function ratio(part, all) {
  return all > 0 ? part / all : null;
}

export class Counts {
  #samples = [];
  #series = new Map(); // key -> {name, labels, key}, of all that was ever seen
  #uptime = 0;

  // What the server remembers; takes the place of what is here, which is younger or the same.
  load(history, now) {
    const keyed = history.series.map((series) => [this.#keyOf(series), series.values]);
    const remembered = history.ages_seconds.map((age, at) => ({
      at: now - age * 1000,
      instance: history.instance,
      values: new Map(
        keyed.filter(([, values]) => values[at] !== null).map(([key, values]) => [key, values[at]]),
      ),
    }));
    const before = this.#samples.filter((sample) => sample.instance !== history.instance);
    this.#samples = [...before, ...remembered].sort((a, b) => a.at - b.at);
  }

  push(live, now) {
    const sample = { at: now, instance: live.instance, values: new Map() };
    for (const each of live.samples) sample.values.set(this.#keyOf(each), each.value);
    const samples = this.#samples;
    // Polls are closer together than what is kept: only the newest may be near the one before it.
    if (samples.length > 1) {
      const [previous, last] = samples.slice(-2);
      if (last.instance === sample.instance && last.at - previous.at < SPACING_MS) samples.pop();
    }
    samples.push(sample);
    this.#uptime = live.uptime_seconds;
    while (samples[0].at < now - KEEP_MS) samples.shift();
  }

  get latest() {
    return this.#samples.at(-1);
  }

  // The samples of the last so many seconds.
  recent(seconds) {
    const begin = this.latest.at - seconds * 1000;
    return this.#samples.filter((sample) => sample.at >= begin);
  }

  // Names of the values that a label of a metric has had.
  labelValues(name, label) {
    const found = new Set();
    for (const series of this.#series.values()) if (series.name === name) found.add(series.labels[label]);
    return [...found].filter((value) => value !== undefined).sort();
  }

  // Those that it has now: a node may have left, and the server may be another.
  labelValuesNow(name, label) {
    return this.labelValues(name, label).filter((value) => this.now(name, { [label]: value }) !== null);
  }

  // The sum of all series that fit in a sample; null where there is none.
  sum(sample, name, wanted = {}) {
    let total = null;
    for (const series of this.#series.values()) {
      if (series.name !== name || !matches(series.labels, wanted)) continue;
      const value = sample.values.get(series.key);
      if (value !== undefined) total = (total ?? 0) + value;
    }
    return total;
  }

  now(name, wanted = {}) {
    return this.sum(this.latest, name, wanted);
  }

  // How much a counter grew since ``before``. A counter without a series has counted nothing yet.
  growth(before, sample, name, wanted = {}) {
    return (
      (this.sum(sample, name, wanted) ?? 0) - (before.values ? (this.sum(before, name, wanted) ?? 0) : 0)
    );
  }

  // Where a span of so many seconds up to now begins: a sample, or the start of the server.
  begin(seconds) {
    const { at, instance } = this.latest;
    if (this.#uptime <= seconds) return { seconds: this.#uptime, values: null };
    const own = this.#samples.filter((sample) => sample.instance === instance);
    const early = own.filter((sample) => sample.at <= at - seconds * 1000).at(-1) ?? own[0];
    return { seconds: (at - early.at) / 1000, values: early.values };
  }

  // For each sample, the oldest one of the same instance at most so many seconds before it; else null.
  trailing(samples, seconds) {
    let first = 0;
    return samples.map((sample, place) => {
      while (samples[first].at < sample.at - seconds * 1000 || samples[first].instance !== sample.instance)
        first += 1;
      return first < place ? samples[first] : null;
    });
  }

  #keyOf({ name, labels }) {
    const key = JSON.stringify([name, ...Object.entries(labels).sort()]);
    if (!this.#series.has(key)) this.#series.set(key, { name, labels, key });
    return key;
  }
}
