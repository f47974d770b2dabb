// Numbers as people read them. Each takes null for "unknown", which is never shown as zero.

const UNKNOWN = "–";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function whole(value) {
  return value === null ? UNKNOWN : grouped.format(value);
}

// Exact up to five digits, then three significant ones and a unit.
export function short(value) {
  if (value === null) return UNKNOWN;
  for (const [size, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e5, "k"],
  ]) {
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)} ${unit}`;
  }
  return value >= 100 || Number.isInteger(value) ? grouped.format(value) : value.toPrecision(2);
}

export function bytes(value) {
  if (value === null) return UNKNOWN;
  for (const [size, unit] of [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${grouped.format(value)} bytes`;
}

export function bytesRate(value) {
  return value === null ? UNKNOWN : `${bytes(value)}/s`;
}

export function rate(value) {
  return value === null ? UNKNOWN : `${short(value)}/s`;
}

// A share that is not all is never rounded to all, nor one that is not nothing to nothing.
export function percent(share) {
  if (share === null) return UNKNOWN;
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share < 1 && share > 0.999) return "> 99.9 %";
  return `${(share * 100).toFixed(share === 0 || share === 1 ? 0 : 1)} %`;
}

export function duration(seconds) {
  const parts = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  let rest = Math.floor(seconds);
  const shown = [];
  for (const [size, unit] of parts.slice(first, first + 2)) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count > 0) shown.push(`${count} ${unit}`);
  }
  return shown.join(" ");
}

export function clock(at) {
  return new Date(at).toLocaleTimeString("en-GB");
}

export function minute(at) {
  return clock(at).slice(0, 5);
}

// A span of counts, at most so many seconds: what began later than that is within it, too.
export function recentName(begin, most) {
  return `last ${duration(begin.values === null ? most : Math.round(begin.seconds / 10) * 10)}`;
}
