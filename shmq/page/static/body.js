// The body of a message: text, JSON, hexadecimal, or the table that Arrow data is.

import { make, number } from "./format.js";

/** Elements that show a body. */
export function bodyOf(body) {
  const more = body.cut ? ", of which this is the beginning" : "";
  const plain = [
    make("p", { class: "quiet" }, `Shown as ${body.kind}${more}.`),
    make("pre", { tabindex: "0", role: "region", "aria-label": "Body" }, body.text),
  ];
  if (!body.arrow) return plain;
  return [...arrowOf(body.arrow), make("details", {}, make("summary", {}, "Bytes"), ...plain)];
}

function arrowOf(found) {
  if (found.error) return [make("p", {}, `It begins as Arrow data. ${found.error}`)];
  const rows = found.complete ? number(found.rows) : `at least ${number(found.rows)}`;
  const parts = [
    make("p", {}, `An Arrow ${found.format} of ${number(found.columns)} columns and ${rows} rows.`),
    grid("Schema", ["column", "type", "may be null"], found.fields.map((each) => [each.name, each.type, each.nullable ? "yes" : "no"])),
  ];
  if (found.stopped) parts.push(make("p", { class: "quiet" }, found.stopped));
  if (found.first.length)
    parts.push(grid("First rows", found.fields.slice(0, found.first[0].length).map((each) => each.name), found.first));
  return parts;
}

function grid(caption, heads, rows) {
  const table = make(
    "table",
    {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))))),
  );
  return make("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": caption }, table);
}
