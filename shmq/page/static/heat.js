// Heat maps: how many messages took how long, over time.

import { clock, colour } from "./chart.js";
import { duration, make, number } from "./format.js";

const HEIGHT = 180;
const LEFT = 64; // room for the names of the rows
const BELOW = 18; // and for the times
const LEAST_ROWS = 8;
const SPANS = [300, 900]; // seconds that are shown: the first that all columns fit into
const SHARES = { "half within": 0.5, "99 % within": 0.99 };
const PERIODS = { "last minute": 60, "5 minutes": 300, "15 minutes": 900 };

/** A heat map, and a table that says the same in numbers. Call `show(columns, bounds, width)` when
 * there are new ones, `close()` at the end. columns: [[begin, counts]], begin in seconds since 1970,
 * each of `width` seconds. bounds: the buckets' upper bounds in ms; the last bucket has none. */
export class HeatMap {
  #title;
  #canvas;
  #rows = make("tbody");
  #observer;
  #scheme = matchMedia("(prefers-color-scheme: dark)");
  #redraw = () => this.#draw();
  #last = null;

  constructor(title) {
    this.#title = title;
    this.#canvas = make("canvas", { role: "img", "aria-label": title, onpointermove: (event) => this.#tell(event) });
    const heads = ["", ...Object.keys(PERIODS)].map((text) => (text ? make("th", { scope: "col", class: "number" }, text) : make("td")));
    this.element = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, title),
      make("div", { class: "plot" }, this.#canvas),
      make("p", { class: "quiet" }, "The stronger the colour, the more messages. Grey: nobody looked at this channel."),
      make("table", { class: "summary" }, make("caption", {}, title), make("thead", {}, make("tr", {}, ...heads)), this.#rows),
    );
    this.#observer = new ResizeObserver(this.#redraw);
    this.#observer.observe(this.#canvas.parentElement);
    this.#scheme.addEventListener("change", this.#redraw);
  }

  show(columns, bounds, width) {
    this.#last = { columns, bounds, width };
    this.#summarize();
    this.#draw();
  }

  close() {
    this.#observer.disconnect();
    this.#scheme.removeEventListener("change", this.#redraw);
  }

  /** The name of a bucket by its upper bound. */
  #name(bucket) {
    const { bounds } = this.#last;
    return bucket < bounds.length ? `up to ${duration(bounds[bucket])}` : `over ${duration(bounds.at(-1))}`;
  }

  #summarize() {
    const { columns } = this.#last;
    const now = Date.now() / 1000;
    const sums = Object.values(PERIODS).map((seconds) => {
      const sum = [];
      for (const [begin, counts] of columns)
        if (begin >= now - seconds) counts.forEach((count, place) => (sum[place] = (sum[place] ?? 0) + count));
      return sum;
    });
    const totals = sums.map((sum) => sum.reduce((all, count) => all + count, 0));
    const row = (title, cells) =>
      make("tr", {}, make("th", { scope: "row" }, title), ...cells.map((text) => make("td", { class: "number" }, text)));
    const shares = Object.entries(SHARES).map(([title, share]) =>
      row(title, sums.map((sum, place) => (totals[place] ? duration(this.#last.bounds[reached(sum, share * totals[place])]) : "–"))),
    );
    this.#rows.replaceChildren(row("messages", totals.map(number)), ...shares);
    const last = totals.at(-1);
    const slow = sums.at(-1).findLastIndex((count) => count > 0);
    this.#canvas.setAttribute(
      "aria-label",
      last ? `${this.#title}: ${number(last)} messages in 15 minutes, the slowest ${this.#name(slow)}. The table has more.` : `${this.#title}: nothing was finished.`,
    );
  }

  #draw() {
    const room = this.#canvas.parentElement.clientWidth;
    if (!this.#last || !room) return;
    const { columns, width } = this.#last;
    const ratio = devicePixelRatio || 1;
    this.#canvas.width = room * ratio;
    this.#canvas.height = HEIGHT * ratio;
    this.#canvas.style.width = `${room}px`;
    this.#canvas.style.height = `${HEIGHT}px`;
    const context = this.#canvas.getContext("2d");
    context.scale(ratio, ratio);
    const rows = this.#rowCount();
    const most = Math.max(1, ...columns.map(([, counts]) => Math.max(...counts)));
    const { x, y, end, span } = this.#places(room, rows);
    const high = (HEIGHT - BELOW) / rows;
    context.fillStyle = colour("line"); // nobody looked
    context.fillRect(LEFT, 0, room - LEFT, HEIGHT - BELOW);
    for (const [begin, counts] of columns) {
      const left = x(begin);
      if (begin < end - span) continue;
      const wide = x(begin + width) - left;
      context.globalAlpha = 1;
      context.fillStyle = colour("ground");
      context.fillRect(left, 0, wide, HEIGHT - BELOW);
      context.fillStyle = colour("accent");
      counts.forEach((count, place) => {
        if (!count) return;
        context.globalAlpha = 0.15 + 0.85 * Math.sqrt(count / most);
        context.fillRect(left, y(place), wide, high);
      });
    }
    context.globalAlpha = 1;
    this.#label(context, room, rows, this.#places(room, rows));
  }

  #label(context, room, rows, { x, y, end, span }) {
    context.fillStyle = colour("quiet");
    context.font = "12px system-ui";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const { bounds } = this.#last;
    const step = Math.max(2, Math.ceil(rows / 6));
    for (let row = 0; row < rows && row < bounds.length; row += step)
      context.fillText(row ? duration(bounds[row]) : `< ${duration(bounds[0])}`, LEFT - 6, Math.max(y(row) + 2, 7));
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    const every = span / 5;
    for (let time = Math.ceil((end - span) / every) * every; time < end; time += every)
      if (x(time) > LEFT + 28 && x(time) < room - 28) context.fillText(clock(time), x(time), HEIGHT - 4);
  }

  /** Buckets that are shown, from the first on. */
  #rowCount() {
    let rows = LEAST_ROWS;
    for (const [, counts] of this.#last.columns) rows = Math.max(rows, counts.findLastIndex((count) => count > 0) + 2);
    return Math.min(rows, this.#last.bounds.length + 1);
  }

  #places(room, rows) {
    const { columns, width } = this.#last;
    const end = (Math.floor(Date.now() / 1000 / width) + 1) * width;
    const span = SPANS.find((span) => !columns.length || columns[0][0] >= end - span) ?? SPANS.at(-1);
    return {
      end,
      span,
      x: (time) => LEFT + ((time - end + span) / span) * (room - LEFT),
      y: (row) => (HEIGHT - BELOW) * (1 - (row + 1) / rows),
    };
  }

  /** Say what is under the pointer. */
  #tell(event) {
    if (!this.#last) return;
    const { columns, width } = this.#last;
    const rows = this.#rowCount();
    const { end, span } = this.#places(this.#canvas.clientWidth, rows);
    const time = end - span + ((event.offsetX - LEFT) / (this.#canvas.clientWidth - LEFT)) * span;
    const row = Math.floor((1 - event.offsetY / (HEIGHT - BELOW)) * rows);
    const found = columns.find(([begin]) => begin <= time && time < begin + width);
    this.#canvas.title = !found || row < 0 ? "" : `${clock(found[0])}, ${this.#name(row)}: ${number(found[1][row] ?? 0)} messages`;
  }
}

/** The place at which the sum of the first counts reaches `wanted`. */
function reached(counts, wanted) {
  let sum = 0;
  const place = counts.findIndex((count) => (sum += count) >= wanted);
  return place < 0 ? counts.length - 1 : place;
}
