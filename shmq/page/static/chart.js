// Curves over time, by uPlot, in the colours of the page.

import uPlot from "./uPlot.esm.js";
import { compact, duration, make } from "./format.js";

/** A colour of page.css. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A chart of several series over the same seconds.
 *
 * series: [{ label, colour (a name in page.css), values }]. stacked: each stands on those before it.
 * unit: "count", or "seconds". Call `show(times, columns)` when the numbers change, `close()` at the
 * end. */
export class Chart {
  #plot = null;
  #title;
  #series;
  #stacked;
  #unit;
  #place;
  #observer;
  #scheme = matchMedia("(prefers-color-scheme: dark)");
  #remade = () => this.#remake();
  #last = null;

  constructor(title, series, { stacked = false, unit = "count" } = {}) {
    this.#title = title;
    this.#series = series;
    this.#stacked = stacked;
    this.#unit = unit;
    this.#place = make("div", { class: "plot" });
    this.summary = make("p", { class: "quiet" });
    this.element = make("figure", { class: "chart" }, make("figcaption", {}, title), this.#place, this.summary);
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(this.#place);
    this.#scheme.addEventListener("change", this.#remade);
  }

  show(times, columns) {
    this.#last = [times, columns];
    const data = [times, ...(this.#stacked ? stack(columns) : columns)];
    if (this.#plot) this.#plot.setData(data);
    else if (this.#place.clientWidth) this.#make(data);
    const now = columns.map((values) => values.at(-1));
    this.summary.replaceChildren(
      ...this.#series.map((each, place) =>
        make(
          "span",
          { class: "key" },
          make("span", { class: `swatch ${each.colour}`, "aria-hidden": "true" }),
          `${each.label} ${this.#text(now[place])}`,
        ),
      ),
    );
  }

  close() {
    this.#observer.disconnect();
    this.#scheme.removeEventListener("change", this.#remade);
    this.#plot?.destroy();
    this.#plot = null;
  }

  #text(value) {
    if (value === null || value === undefined) return "–";
    return this.#unit === "seconds" ? duration(value * 1000) : compact(value);
  }

  #make(data) {
    const stroke = () => colour("quiet");
    const grid = { stroke: () => colour("line"), width: 1 };
    const axis = { stroke, grid, ticks: grid, font: "12px system-ui" };
    const drawn = this.#series.map((each) => ({
      label: each.label,
      stroke: colour(each.colour),
      fill: this.#stacked ? `${colour(each.colour)}aa` : undefined,
      width: 1.5,
      points: { show: false },
    }));
    const bands = this.#stacked
      ? this.#series.slice(1).map((_, place) => ({ series: [place + 2, place + 1] }))
      : [];
    this.#plot = new uPlot(
      {
        width: this.#place.clientWidth,
        height: 180,
        legend: { show: false },
        cursor: { drag: { x: false, y: false } },
        scales: { y: { range: (_, least, most) => [Math.min(least ?? 0, 0), Math.max(most ?? 1, 1)] } },
        series: [{}, ...drawn],
        bands,
        axes: [{ ...axis, values: (_, times) => times.map(clock) }, { ...axis, size: 72, values: (_, values) => values.map((value) => this.#text(value)) }],
      },
      data,
      this.#place,
    );
  }

  #remake() {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#last) this.show(...this.#last);
  }

  #resize() {
    if (this.#plot) this.#plot.setSize({ width: this.#place.clientWidth, height: 180 });
    else if (this.#last) this.show(...this.#last);
  }
}

/** Seconds since 1970 as the time of day. */
export function clock(time) {
  return new Date(time * 1000).toTimeString().slice(0, 8);
}

function stack(columns) {
  const sums = [];
  for (const values of columns) {
    const below = sums.at(-1);
    // null is a gap
    sums.push(below ? values.map((value, place) => (value === null ? null : value + below[place])) : [...values]);
  }
  return sums;
}

/** A small line of the last values, for a row of a table. */
export function sparkline(values) {
  const canvas = make("canvas", { class: "spark", width: 120, height: 36, "aria-hidden": "true" });
  const most = Math.max(...values, 1);
  const context = canvas.getContext("2d");
  context.strokeStyle = colour("accent");
  context.lineWidth = 2;
  context.beginPath();
  values.forEach((value, place) => {
    const x = (place / Math.max(values.length - 1, 1)) * 118 + 1;
    context.lineTo(x, 34 - (value / most) * 32);
  });
  context.stroke();
  return canvas;
}

/** The bars of a histogram. bounds: upper bounds in ms, of which the last may be missing. */
export function histogram(title, bounds, messages) {
  const most = Math.max(...messages, 1);
  const bars = messages.map((count, place) => {
    const bar = make("div", { class: "bar" });
    bar.style.height = `${(count / most) * 100}%`;
    const upper = place < bounds.length ? `up to ${duration(bounds[place])}` : "longer";
    return make("div", { class: "slot", title: `${upper}: ${count} messages` }, bar);
  });
  const first = bounds.length ? duration(bounds[0]) : "–";
  const last = bounds.length ? duration(bounds.at(-1)) : "–";
  return make(
    "figure",
    { class: "chart" },
    make("figcaption", {}, title),
    make("div", { class: "bars", role: "img", "aria-label": `${title}, from ${first} to ${last}` }, ...bars),
    make("p", { class: "quiet ends" }, make("span", {}, first), make("span", {}, last)),
  );
}
