// What was recorded of one channel, and how long its messages took, over time.

import { Chart } from "./chart.js";
import { HeatMap } from "./heat.js";
import { make } from "./format.js";
import { ask, KEPT } from "./model.js";
import { RATES, STATES } from "./series.js";

const MINUTES = 1440; // of a day
const FAILURES = [
  { label: "redelivered", name: "requeued", colour: "flight" },
  { label: "dead letters", name: "dead", colour: "bad" },
];
const OLDEST = [{ label: "oldest", name: "oldest", colour: "bad" }];
const COLUMNS = 180; // of the heat maps

/** The charts of one channel. Call `look()` from time to time, `close()` at the end. */
export class Past {
  #place;
  #period = "second";
  #records = null; // of the period that is shown
  #heat = { number: 0, columns: new Map() };
  #maps = [new HeatMap("Wait, from publish to the last take"), new HeatMap("Processing, from that take to finish")];
  #charts = [
    [new Chart("Messages by state", STATES, { stacked: true }), STATES],
    [new Chart("Messages a second", RATES), RATES],
    [new Chart("Age of the oldest waiting message", OLDEST, { unit: "seconds" }), OLDEST],
    [new Chart("Redeliveries and dead letters a second", FAILURES), FAILURES],
  ];
  #said = make("p", { class: "quiet", role: "status" });

  constructor(place) {
    this.#place = place;
    const period = make(
      "select",
      { id: "channel-period", onchange: (event) => this.#choose(event.target.value) },
      make("option", { value: "second" }, "last hour"),
      make("option", { value: "minute" }, "last day"),
    );
    this.element = make(
      "section",
      { "aria-label": "Over time" },
      make("p", { class: "tools" }, make("label", { for: "channel-period" }, "Charts of the "), period),
      this.#said,
      make("div", { class: "charts" }, ...this.#charts.map(([chart]) => chart.element), ...this.#maps.map((map) => map.element)),
    );
  }

  async look() {
    await Promise.all([this.#recall(), this.#warm()]);
  }

  close() {
    for (const [chart] of this.#charts) chart.close();
    for (const map of this.#maps) map.close();
  }

  #choose(period) {
    this.#period = period;
    this.#records = null;
    this.#recall().catch(() => null); // the next look says what is wrong
  }

  /** Ask for what was recorded since the last time. */
  async #recall() {
    const period = this.#period;
    const last = this.#records?.time.at(-1);
    const since = last === undefined ? 0 : Math.round(last * 1000);
    const found = await ask("history", { ...this.#place, period, since }).catch(() => ({ time: [] }));
    if (period !== this.#period) return;
    const most = period === "second" ? KEPT : MINUTES;
    if (found.time.length) {
      const before = this.#records;
      const joined = ([name, values]) => [name, before ? [...before[name], ...values].slice(-most) : values];
      this.#records = Object.fromEntries(Object.entries(found).map(joined));
    }
    this.#say(period);
    const { time = [], ...series } = this.#records ?? {};
    for (const [chart, columns] of this.#charts) chart.show(time, columns.map(({ name }) => series[name] ?? []));
  }

  #say(period) {
    const [unit, all] = period === "second" ? ["seconds", "hour"] : ["minutes", "day"];
    const count = this.#records?.ready.filter((value) => value !== null).length ?? 0;
    this.#said.textContent = count
      ? `Recorded in ${count} ${unit} of the last ${all}. A gap is a time in which no supervisor ran, or this channel was none of the busiest.`
      : `Nothing was recorded of this channel in the last ${all}: it was none of the busiest, no supervisor ran, or --history-bytes is 0.`;
  }

  async #warm() {
    const found = await ask("heat", { ...this.#place, since: this.#heat.number });
    const { columns } = this.#heat;
    if (found.number < this.#heat.number) columns.clear(); // the server has started again
    for (const column of found.columns) columns.set(column[0], column);
    for (const begin of [...columns.keys()].slice(0, -COLUMNS)) columns.delete(begin);
    this.#heat.number = found.number;
    this.#maps.forEach((map, place) =>
      map.show([...columns.values()].map((column) => [column[0], column[1 + place]]), found.bounds, found.width),
    );
  }
}
