// What the server says, and what has been said since this page was opened.

import { call, refusal } from "./door.js";

/** Seconds of history that the page keeps. */
export const KEPT = 3600;
/** Points of the small line in a row. */
export const POINTS = 60;
/** Milliseconds after which a page that has lost its server asks it again. */
const AGAIN = 3000;
/** The series of the overview: sums over all queues. */
const SUMS = ["ready", "disk", "in_flight", "deferred", "leased", "in", "out", "finished", "requeued"];

/** The rows of all queues and the facts of the instance. Fires "change" after each tick and
 * "connection" when the connection comes or goes.
 *
 * The work of a tick grows with the rows that changed, not with all of them. */
export class Model extends EventTarget {
  rows = new Map();
  serials = []; // the keys of `rows`: another array whenever queues come, go or change their names
  facts = {};
  columns = {};
  connected = false;
  lost = "";
  history = { time: [], oldest: [], ...Object.fromEntries(SUMS.map((name) => [name, []])) };
  #sums = Object.fromEntries(SUMS.map((name) => [name, 0])); // in tenths, so that they stay exact
  #waiting = new Set(); // serials of rows with an age
  #lines = new Map(); // serial -> [tick, depth] whenever the depth became another one
  #ticks = 0;
  #began = 0; // the tick with which all rows came

  /** Follow the server's events, and try again whenever they end. An EventSource could send no header. */
  async connect() {
    let lost = "The connection is lost; trying again.";
    try {
      const answer = await call("ticks");
      if (!answer.ok) lost = refusal() || (await answer.text());
      else await this.#follow(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch {
      // the server is gone
    }
    this.#connection(false, lost);
    setTimeout(() => this.connect(), AGAIN);
  }

  /** Take the events of a stream until it ends. */
  async #follow(reader) {
    let pieces = []; // of the event that has not come completely
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      let text = pieces.length && pieces.at(-1).endsWith("\n") ? pieces.pop() + value : value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        this.#event(pieces.join("") + text.slice(0, end));
        pieces = [];
        text = text.slice(end + 2);
      }
      if (text) pieces.push(text);
    }
  }

  #event(text) {
    const [, kind, data] = /^event: (\w+)\ndata: (.*)$/s.exec(text) ?? [];
    if (kind === "state") this.#state(JSON.parse(data));
    else if (kind === "tick") this.#tick(JSON.parse(data));
  }

  /** A value of a row by its column's name. */
  value(row, name) {
    return row[this.columns[name]];
  }

  /** The last depths of a queue, the oldest first. */
  line(serial) {
    const row = this.rows.get(serial);
    if (!row) return [];
    const changes = this.#lines.get(serial) ?? [[this.#began, this.#depth(row)]];
    const line = [];
    for (let tick = Math.max(changes[0][0], this.#ticks - POINTS), at = 0; tick < this.#ticks; tick++) {
      while (at + 1 < changes.length && changes[at + 1][0] <= tick) at++;
      line.push(changes[at][1]);
    }
    return line;
  }

  #depth(row) {
    return this.value(row, "ready") + this.value(row, "disk");
  }

  #state(state) {
    this.columns = Object.fromEntries(state.columns.map((name, place) => [name, place]));
    this.#clear();
    this.#connection(true, "");
    this.#tick(state);
    this.#recall();
  }

  /** Put what the supervisor recorded before what this page has seen. */
  async #recall() {
    let past;
    try {
      past = await ask("history");
    } catch {
      return; // nothing is recorded
    }
    const history = this.history;
    const first = history.time[0] ?? Infinity;
    const count = past.time.filter((time) => time < first).length;
    for (const name of Object.keys(history)) {
      history[name] = [...past[name].slice(0, count), ...history[name]].slice(-KEPT);
    }
    this.dispatchEvent(new Event("change"));
  }

  #clear() {
    this.rows.clear();
    this.serials = [];
    this.#lines.clear();
    this.#waiting.clear();
    this.#began = this.#ticks;
    for (const name of SUMS) this.#sums[name] = 0;
  }

  #tick(tick) {
    const { rows, went, columns, ...facts } = tick;
    let named = false;
    for (const serial of went) named = this.#forget(serial) || named;
    for (const [serial, row] of Object.entries(rows)) named = this.#put(serial, row) || named;
    if (facts.gone) this.#clear();
    else if (named) this.serials = [...this.rows.keys()];
    this.facts = facts;
    this.#remember(facts.time);
    this.dispatchEvent(new Event("change"));
  }

  /** Take up a row; whether it is new, or its name is. */
  #put(serial, row) {
    const before = this.rows.get(serial);
    const depth = this.#depth(row);
    if (before) this.#add(before, -1);
    if (before ? depth !== this.#depth(before) : this.#ticks > this.#began) {
      const changes = this.#lines.get(serial) ?? (before ? [[this.#began, this.#depth(before)]] : []);
      changes.push([this.#ticks, depth]);
      while (changes.length > 1 && changes[1][0] <= this.#ticks - POINTS) changes.shift();
      this.#lines.set(serial, changes);
    }
    this.rows.set(serial, row);
    this.#add(row, 1);
    if (this.value(row, "oldest") === null) this.#waiting.delete(serial);
    else this.#waiting.add(serial);
    return !before || this.value(before, "channel") !== this.value(row, "channel");
  }

  /** Forget a row that went; whether it was there. */
  #forget(serial) {
    const row = this.rows.get(serial);
    if (!row) return false;
    this.#add(row, -1);
    this.rows.delete(serial);
    this.#lines.delete(serial);
    this.#waiting.delete(serial);
    return true;
  }

  #add(row, sign) {
    for (const name of SUMS) this.#sums[name] += sign * Math.round(this.value(row, name) * 10);
  }

  #remember(time) {
    let oldest = 0;
    for (const serial of this.#waiting) oldest = Math.max(oldest, this.value(this.rows.get(serial), "oldest"));
    this.#ticks++;
    const history = this.history;
    history.time.push(time);
    history.oldest.push(oldest / 1000);
    for (const name of SUMS) history[name].push(this.#sums[name] / 10);
    if (history.time.length > KEPT) for (const series of Object.values(history)) series.shift();
  }

  #connection(connected, lost) {
    this.connected = connected;
    this.lost = lost;
    this.dispatchEvent(new Event("connection"));
  }
}

/** Ask the server for JSON. Throws an Error with its words. */
export async function ask(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null);
  const query = new URLSearchParams(given).toString();
  const answer = await call(query ? `${path}?${query}` : path);
  const text = await answer.text();
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error(text || `the server answered ${answer.status}`);
  }
  if (!answer.ok) throw new Error(value.error ?? `the server answered ${answer.status}`);
  return value;
}
