// A table of which only the rows in sight exist, so that many thousands of them scroll smoothly.

import { make } from "./format.js";

const HEIGHT = 30; // px of a row, as in page.css
const SPARE = 8; // rows above and below those in sight

/** `<shmq-table>`: set `columns`, then `items` as often as they change; `refresh()` if the items are
 * the same and only what their columns say changed.
 *
 * A column: `title`; `text(item)` a string, or an element if the column has `sign(item)`: the element
 * is made anew when this string is another. So a button stays the same while somebody presses it.
 * `value(item)`: what it is sorted by (a column without is not sorted); `number: true` aligns to the
 * right. `key(item)` names a row. */
class Table extends HTMLElement {
  key = (item) => item;
  #rows = new Map(); // key -> { row, cells: [{ cell, sign }] }, of those in sight
  #above;
  #below;
  #pressed = false;
  #columns = [];
  #items = [];
  #sorted = [];
  #by = null;
  #down = false;
  #filter = () => true;
  #body;
  #scroller;
  #heads = [];
  #frame = 0;
  #caption = "";

  connectedCallback() {
    if (this.#scroller) return;
    this.#caption = this.getAttribute("caption") ?? "";
    this.#above = make("tr", { "aria-hidden": "true", class: "spacer" });
    this.#below = make("tr", { "aria-hidden": "true", class: "spacer" });
    this.#body = make("tbody", { onpointerdown: () => this.#press() }, this.#above, this.#below);
    const head = make("tr");
    this.#heads = this.#columns.map((column, place) => this.#head(column, place));
    head.append(...this.#heads);
    const table = make("table", {}, make("caption", {}, this.#caption), make("thead", {}, head), this.#body);
    this.#scroller = make("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": this.#caption }, table);
    this.#scroller.addEventListener("scroll", () => this.#later());
    this.#scroller.addEventListener("keydown", (event) => this.#keys(event));
    this.append(this.#scroller);
    this.#observer = new ResizeObserver(() => this.#later());
    this.#observer.observe(this.#scroller);
    this.#order();
  }

  #observer = null;

  disconnectedCallback() {
    this.#observer?.disconnect();
    cancelAnimationFrame(this.#frame);
  }

  set columns(columns) {
    this.#columns = columns;
  }

  set items(items) {
    this.#items = items;
    this.#order();
  }

  refresh() {
    if (this.#columns[this.#by ?? -1]) this.#order();
    else this.#later();
  }

  /** The function that says which items are shown. */
  set filter(filter) {
    this.#filter = filter;
    this.#order();
  }

  /** Sort by the column of this title. */
  sortBy(title, down = false) {
    this.#by = this.#columns.findIndex((column) => column.title === title);
    this.#down = down;
    this.#order();
  }

  #head(column, place) {
    const side = column.number ? "number" : null;
    if (!column.value) return make("th", { scope: "col", class: side }, column.title);
    const sort = () => {
      this.#down = this.#by === place ? !this.#down : Boolean(column.number);
      this.#by = place;
      this.#order();
    };
    return make("th", { scope: "col", class: side }, make("button", { type: "button", onclick: sort }, column.title));
  }

  #order() {
    this.#sorted = this.#items.filter(this.#filter);
    const column = this.#columns[this.#by ?? -1];
    if (column) {
      const sign = this.#down ? -1 : 1;
      const keyed = this.#sorted.map((item) => [column.value(item), item]);
      keyed.sort(([x], [y]) => (x === y ? 0 : x === null ? 1 : y === null ? -1 : (x < y ? -1 : 1) * sign));
      this.#sorted = keyed.map(([, item]) => item);
    }
    for (const [place, head] of this.#heads.entries()) {
      if (!this.#columns[place].value) continue;
      const how = this.#by !== place ? "none" : this.#down ? "descending" : "ascending";
      head.setAttribute("aria-sort", how);
    }
    this.#later();
  }

  #later() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#draw());
  }

  /** No row moves away from under a button of the mouse that is down. */
  #press() {
    this.#pressed = true;
    const release = () => {
      this.#pressed = false;
      for (const name of ["pointerup", "pointercancel"]) removeEventListener(name, release);
      setTimeout(() => this.#later()); // after the click
    };
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, release);
  }

  #draw() {
    if (!this.#scroller || this.#pressed) return;
    const seen = Math.ceil(this.#scroller.clientHeight / HEIGHT) || 20;
    const most = Math.max(this.#sorted.length - seen, 0);
    const first = Math.max(Math.min(Math.floor(this.#scroller.scrollTop / HEIGHT), most) - SPARE, 0);
    const last = Math.min(first + seen + 2 * SPARE, this.#sorted.length);
    const focused = document.activeElement;
    const before = this.#rows;
    this.#rows = new Map();
    for (let place = first; place < last; place++) {
      const item = this.#sorted[place];
      let key = String(this.key(item));
      while (this.#rows.has(key)) key += " ";
      const drawn = before.get(key) ?? this.#row();
      before.delete(key);
      this.#rows.set(key, drawn);
      drawn.row.setAttribute("aria-rowindex", place + 2);
      this.#fill(drawn.cells, item);
    }
    const hadFocus = this.#body.contains(focused);
    for (const { row } of before.values()) row.remove();
    let next = this.#above.nextSibling;
    for (const { row } of this.#rows.values()) {
      if (row === next) next = next.nextSibling;
      else next.before(row);
    }
    this.#above.style.height = `${first * HEIGHT}px`;
    this.#below.style.height = `${(this.#sorted.length - last) * HEIGHT}px`;
    this.#scroller.querySelector("table").setAttribute("aria-rowcount", this.#sorted.length + 1);
    this.classList.toggle("empty", this.#sorted.length === 0);
    if (hadFocus && document.activeElement !== focused)
      (focused.isConnected ? focused : this.#scroller).focus({ preventScroll: true });
  }

  #row() {
    const cells = this.#columns.map((column, at) => ({
      cell: make(at ? "td" : "th", { scope: at ? null : "row", class: column.number ? "number" : null }),
      sign: null,
    }));
    return { row: make("tr", {}, ...cells.map(({ cell }) => cell)), cells };
  }

  /** Write what changed into the cells of a row. */
  #fill(cells, item) {
    for (const [at, column] of this.#columns.entries()) {
      const shown = cells[at];
      const sign = (column.sign ?? column.text)(item);
      if (sign === shown.sign) continue;
      shown.sign = sign;
      shown.cell.replaceChildren(column.sign ? column.text(item) : sign);
    }
  }

  /** Arrows move between the links of the rows; the browser scrolls by Page Up, Home and End. */
  #keys(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const links = [...this.#body.querySelectorAll("tr th a")];
    if (!links.length) return;
    const at = links.indexOf(document.activeElement);
    const next = links[at < 0 ? 0 : Math.min(Math.max(at + step, 0), links.length - 1)];
    next.focus();
    event.preventDefault();
  }
}

customElements.define("shmq-table", Table);

/** A new table. */
export function table(caption, columns, key) {
  const made = document.createElement("shmq-table");
  made.setAttribute("caption", caption);
  made.columns = columns;
  made.key = key;
  return made;
}
