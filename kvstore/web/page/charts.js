// Plain SVG: values over time, stacked or as lines, and one curve. A chart is a figure that the page
// brings along; here it is filled: the drawing, a legend with the values under the cursor, a sentence and
// a table that say the same in words.

import { element, shape } from "./dom.js";
import { clock, duration, minute } from "./format.js";

const HEIGHT = 168;
const TOP = 10;
const BOTTOM = 20;
const HOLE_MS = 20_000;
const TABLE_ROWS = 12;

// A bound for the axis that is easy to read: 1, 2 or 5 times a power of ten, of a binary unit for bytes.
function niceBound(most, unit) {
  if (most <= 0) return unit;
  const scale = unit ** Math.floor(Math.log(most) / Math.log(unit));
  const power = 10 ** Math.floor(Math.log10(most / scale));
  return [1, 2, 5, 10].find((step) => step * power * scale >= most) * power * scale;
}

class Chart {
  constructor(figure, format) {
    this.figure = figure;
    this.format = format;
    this.name = figure.querySelector("figcaption").textContent.trim();
    this.legend = element("ul", { class: "legend" });
    this.svg = shape("svg", { role: "img", tabindex: "0", height: HEIGHT });
    this.empty = element("p", { class: "empty" });
    this.spoken = element("p", { class: "spoken", "aria-live": "polite" });
    this.table = element("table");
    const details = element(
      "details",
      {},
      element("summary", {}, "As a table"),
      element("div", { class: "scroll" }, this.table),
    );
    details.addEventListener("toggle", () => this.draw());
    this.details = details;
    figure.append(this.legend, this.svg, this.empty, this.spoken, details);
    this.cursor = null;
    this.data = null;
    new ResizeObserver(() => this.draw()).observe(figure);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.move(null));
  }

  // Shows data, or the sentence that says why there is none.
  show(data, reason = "") {
    this.data = data;
    // Samples fall out of the time shown: the cursor stays among those that are left.
    if (data && this.cursor !== null) this.cursor = Math.min(this.cursor, this.length - 1);
    this.empty.textContent = data ? "" : reason;
    for (const part of [this.legend, this.svg, this.details]) part.hidden = !data;
    this.svg.toggleAttribute("data-hidden", !data);
    this.draw();
  }

  draw() {
    if (!this.data || !this.svg.clientWidth) return;
    this.width = this.svg.clientWidth;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.paint();
    this.paintCursor();
    this.svg.setAttribute("aria-label", `${this.name}. ${this.sentence()}`);
    if (this.details.open) this.table.replaceChildren(...this.rows());
  }

  y(value) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / this.bound);
  }

  axis() {
    for (const share of [0, 0.5, 1]) {
      const y = this.y(share * this.bound);
      this.svg.append(shape("line", { class: "grid", x1: 0, x2: this.width, y1: y, y2: y }));
      if (share > 0) this.svg.append(shape("text", { x: 0, y: y + 11 }, this.format(share * this.bound)));
    }
  }

  label(x, text) {
    const anchor = x < 30 ? "start" : x > this.width - 30 ? "end" : "middle";
    this.svg.append(shape("text", { x, y: HEIGHT - 5, "text-anchor": anchor }, text));
  }

  paintCursor() {
    const x = this.cursor === null ? null : this.place(this.cursor);
    if (x !== null)
      this.svg.append(shape("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    this.paintLegend(this.cursor ?? this.length - 1);
  }

  point(offset) {
    if (!this.data) return;
    let nearest = 0;
    for (let at = 1; at < this.length; at += 1) {
      if (Math.abs(this.place(at) - offset) < Math.abs(this.place(nearest) - offset)) nearest = at;
    }
    this.move(nearest);
  }

  move(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  key(event) {
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      PageUp: -10,
      PageDown: 10,
      Home: -this.length,
      End: this.length,
    };
    if (event.key === "Escape") this.move(null);
    if (!this.data || !(event.key in steps)) return;
    event.preventDefault();
    const from = this.cursor ?? this.length - 1;
    this.move(Math.min(this.length - 1, Math.max(0, from + steps[event.key])));
    this.spoken.textContent = this.says(this.cursor);
  }
}

// data: {times, instances, span: [from, to], series: [{name, hue, values}], stacked, bound, unit}. A value null is a
// gap. ``bound`` ends the axis where that is known; ``unit`` is 1024 for bytes.
export class TimeChart extends Chart {
  get length() {
    return this.data.times.length;
  }

  x(at) {
    const [from, to] = this.data.span;
    return ((at - from) / (to - from)) * this.width;
  }

  place(at) {
    return this.x(this.data.times[at]);
  }

  paint() {
    const { times, series, stacked, bound, unit, span } = this.data;
    const heights = times.map((_, at) => {
      const values = series.map((each) => each.values[at] ?? 0);
      return stacked ? values.reduce((sum, value) => sum + value, 0) : Math.max(0, ...values);
    });
    this.bound = bound ?? niceBound(Math.max(0, ...heights), unit ?? 10);
    const floor = times.map(() => 0);
    for (const each of series) {
      const low = [...floor];
      const high = each.values.map((value, at) => (value === null ? null : (stacked ? low[at] : 0) + value));
      if (stacked) for (const run of this.runs(high)) this.paintArea(run, low, high, each.hue);
      // The edge of a layer without thickness would hide the one below it; alone, zero is a value to show.
      const edge = high.map((value, at) =>
        stacked && each.values[at] === 0 && heights[at] > 0 ? null : value,
      );
      for (const run of this.runs(edge)) this.paintLine(run, edge, each.hue);
      if (stacked)
        high.forEach((value, at) => {
          floor[at] = value ?? floor[at];
        });
    }
    this.axis();
    this.label(0, minute(span[0]));
    this.label(this.width / 2, minute((span[0] + span[1]) / 2));
    this.label(this.width, minute(span[1]));
  }

  points(run, values) {
    return run.map((at) => `${this.place(at).toFixed(1)},${this.y(values[at]).toFixed(1)}`);
  }

  paintArea(run, low, high, hue) {
    const outline = [...this.points(run, high), ...this.points(run, low).reverse()];
    this.svg.append(shape("polygon", { class: `area ${hue}`, points: outline.join(" ") }));
  }

  paintLine(run, values, hue) {
    const points = this.points(run, values);
    // A value that stands alone between two gaps would have no length.
    if (points.length === 1) points.push(points[0]);
    this.svg.append(shape("polyline", { class: `line ${hue}`, points: points.join(" ") }));
  }

  // Places of values that hang together: a gap is a value that is not known, a time without samples, or a
  // restart of the server.
  runs(values) {
    const runs = [];
    let run = [];
    const { times, instances } = this.data;
    values.forEach((value, at) => {
      const last = run.at(-1);
      const torn = run.length > 0 && (times[at] - times[last] > HOLE_MS || instances[at] !== instances[last]);
      if (run.length > 0 && (value === null || torn)) runs.push(run.splice(0));
      if (value !== null) run.push(at);
    });
    if (run.length > 0) runs.push(run);
    return runs;
  }

  paintLegend(at) {
    const items = this.data.series.map((each) =>
      element(
        "li",
        {},
        element("span", { class: `key ${each.hue}` }),
        `${each.name} `,
        element("b", {}, this.format(each.values[at])),
      ),
    );
    const when = this.cursor === null ? "now" : `at ${clock(this.data.times[at])}`;
    this.legend.replaceChildren(...items, element("li", { class: "when" }, when));
  }

  says(at) {
    const values = this.data.series.map((each) => `${each.name} ${this.format(each.values[at])}`);
    return `${clock(this.data.times[at])}: ${values.join(", ")}`;
  }

  sentence() {
    const { span, series } = this.data;
    const said = series.map(({ name, values }) => {
      const known = values.filter((value) => value !== null);
      if (known.length === 0) return `${name}: not known`;
      const range = `between ${this.format(Math.min(...known))} and ${this.format(Math.max(...known))}`;
      return `${name}: now ${this.format(values.at(-1))}, ${range}`;
    });
    return `Last ${duration((span[1] - span[0]) / 1000)}. ${said.join(". ")}. Arrow keys read single values.`;
  }

  rows() {
    const step = Math.max(1, Math.ceil(this.length / TABLE_ROWS));
    const head = element(
      "tr",
      {},
      element("th", { scope: "col" }, "time"),
      ...this.data.series.map((each) => element("th", { scope: "col" }, each.name)),
    );
    const rows = [];
    for (let at = this.length - 1; at >= 0; at -= step) {
      const cells = this.data.series.map((each) => element("td", {}, this.format(each.values[at])));
      rows.push(element("tr", {}, element("th", { scope: "row" }, clock(this.data.times[at])), ...cells));
    }
    return [element("thead", {}, head), element("tbody", {}, ...rows)];
  }
}

// data: {points: [{scale, value, label}]}, by rising scale. The x axis is logarithmic.
export class Curve extends Chart {
  get length() {
    return this.data.points.length;
  }

  place(at) {
    const scales = this.data.points.map((point) => Math.log(point.scale));
    const [first, last] = [scales[0], scales.at(-1)];
    return 34 + ((scales[at] - first) / (last - first || 1)) * (this.width - 68);
  }

  paint() {
    const { points } = this.data;
    this.bound = 1;
    this.axis();
    const drawn = points.map((point, at) => `${this.place(at).toFixed(1)},${this.y(point.value).toFixed(1)}`);
    this.svg.append(shape("polyline", { class: "line blue", points: drawn.join(" ") }));
    points.forEach((point, at) => {
      const radius = point.scale === 1 ? 5 : 3;
      this.svg.append(
        shape("circle", { class: "dot blue", cx: this.place(at), cy: this.y(point.value), r: radius }),
      );
      this.label(this.place(at), `×${point.scale}`);
    });
  }

  paintLegend(at) {
    const shown =
      this.cursor === null ? this.data.points.filter((point) => point.scale === 1) : [this.data.points[at]];
    this.legend.replaceChildren(
      ...shown.map((point) =>
        element(
          "li",
          {},
          element("span", { class: "key blue" }),
          `${point.label} `,
          element("b", {}, this.format(point.value)),
        ),
      ),
    );
  }

  says(at) {
    const point = this.data.points[at];
    return `${point.label}: ${this.format(point.value)}`;
  }

  sentence() {
    return `${this.data.points.map((_, at) => this.says(at)).join(". ")}. Arrow keys read single values.`;
  }

  rows() {
    const head = element(
      "tr",
      {},
      element("th", { scope: "col" }, "pool"),
      element("th", { scope: "col" }, "hit tokens, share of asked tokens"),
    );
    const rows = this.data.points.map((point) =>
      element(
        "tr",
        {},
        element("th", { scope: "row" }, point.label),
        element("td", {}, this.format(point.value)),
      ),
    );
    return [element("thead", {}, head), element("tbody", {}, ...rows)];
  }
}
