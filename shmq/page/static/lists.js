// The views that are one list: dead letters, leases, processes, deaths, results stores.

import { action } from "./actions.js";
import { leasesTable } from "./channel.js";
import { bytes, channelAddress, duration, make, moment, number } from "./format.js";
import { Looks } from "./looks.js";
import { ask } from "./model.js";
import { table } from "./table.js";

/** A list that is asked for every two seconds. */
class List {
  #path;
  #table;
  #looks;
  #none;

  constructor(title, path, made, none, ...more) {
    this.title = title;
    this.#path = path;
    this.#table = made;
    this.#looks = new Looks(() => this.#look());
    this.#none = make("p", { class: "quiet", hidden: true }, none);
    this.element = make("div", {}, make("h2", {}, title), this.#looks.error, this.#none, made, ...more);
  }

  update() {}

  close() {
    this.#looks.close();
  }

  async #look() {
    const items = await ask(this.#path);
    this.#table.items = items;
    this.#none.hidden = items.length > 0;
  }
}

function letterActions(item, said) {
  const [topic, channel] = (item.source ?? "").split("/");
  if (!channel) return "–";
  // A dead topic with several channels has each letter once in each.
  const via = item.channel === "dead" ? null : item.channel;
  const chosen = { topic, channel, reason: item.reason, error: item.error, exact: true, via };
  const more = ["--exact"];
  if (item.reason !== null) more.push("--reason", item.reason);
  if (item.error !== null) more.push("--error", item.error);
  if (via !== null) more.push("--via", via);
  const command = (verb) => ({ verbs: ["dead", verb], more, names: [topic, channel] });
  const done = (text, failed) => {
    said.textContent = text;
    said.className = failed ? "error" : "quiet";
  };
  return make(
    "span",
    {},
    action("Send back", { action: "redrive", ...chosen }, command("redrive"), done),
    " ",
    action("Drop", { action: "drop", ...chosen }, command("drop"), done),
  );
}

export function deadLetters() {
  const said = make("p", { role: "status", class: "quiet" });
  const made = table(
    "Dead letters by reason and error",
    [
      {
        title: "died in",
        value: (item) => item.source,
        sign: () => "",
        text: (item) => make("a", { href: channelAddress(item.topic, item.channel) }, item.source ?? `${item.topic}/${item.channel}`),
      },
      { title: "letters", number: true, value: (item) => item.count, text: (item) => number(item.count) },
      { title: "reason", value: (item) => item.reason, text: (item) => item.reason ?? "–" },
      { title: "error", value: (item) => item.error, text: (item) => item.error ?? "–" },
      { title: "first", value: (item) => item.first, text: (item) => moment(item.first) },
      { title: "last", value: (item) => item.last, text: (item) => moment(item.last) },
      { title: "example", text: (item) => item.example.body.text },
      { title: "do", sign: () => "", text: (item) => letterActions(item, said) },
    ],
    (item) => JSON.stringify([item.topic, item.channel, item.source, item.reason, item.error]),
  );
  const hint = make("p", { class: "quiet" }, "To send them back: ", make("code", {}, "shmq dead redrive TOPIC CHANNEL"));
  return new List("Dead letters", "dead", made, "No message has died.", said, hint);
}

export function leases() {
  return new List("Leases", "leases", leasesTable("Open leases"), "No lease is open.");
}

export function processes() {
  const counted = (title, name) => ({ title, number: true, value: (item) => item[name], text: (item) => number(item[name]) });
  const made = table(
    "Attached processes",
    [
      { title: "pid", value: (item) => item.pid, text: (item) => String(item.pid) },
      { title: "kind", value: (item) => item.kind, text: (item) => item.kind },
      { title: "command", value: (item) => item.command, text: (item) => item.command || "–" },
      { title: "user", number: true, value: (item) => item.user, text: (item) => String(item.user) },
      { title: "since", value: (item) => item.since, text: (item) => moment(item.since) },
      counted("messages held", "holds"),
      counted("views held", "views"),
    ],
    (item) => `${item.pid} ${item.since} ${item.kind}`,
  );
  return new List("Processes", "processes", made, "No process is attached.");
}

export function deaths() {
  const held = (item) =>
    item.held.map((each) => `${each.message_count} of ${each.topic}/${each.channel ?? ""}`).join(", ");
  const how = (item) =>
    item.how === "killed" ? `killed by signal ${item.status}` : item.how === "exited" ? `exited with ${item.status}` : item.how;
  const made = table(
    "Deaths",
    [
      { title: "when", value: (item) => item.time, text: (item) => moment(item.time) },
      { title: "pid", number: true, value: (item) => item.pid, text: (item) => String(item.pid) },
      { title: "kind", value: (item) => item.kind, text: (item) => item.kind },
      { title: "program", value: (item) => item.program, text: (item) => item.program || "–" },
      { title: "how", value: how, text: how },
      { title: "messages returned", number: true, value: (item) => item.message_count, text: (item) => number(item.message_count) },
      { title: "held", text: (item) => held(item) || "–" },
      { title: "locks", text: (item) => item.locks.join(", ") || "–" },
      { title: "queues rebuilt", number: true, value: (item) => item.rebuilt_count, text: (item) => number(item.rebuilt_count) },
      { title: "repaired in", number: true, value: (item) => item.repair_ms, text: (item) => duration(item.repair_ms) },
    ],
    (item) => String(item.number),
  );
  return new List("Deaths", "deaths", made, "Nobody has died.");
}

export function results() {
  const counted = (title, name) => ({ title, number: true, value: (item) => item[name], text: (item) => number(item[name]) });
  const made = table(
    "Results stores",
    [
      { title: "name", value: (item) => item.name, text: (item) => item.name },
      { title: "keys", number: true, value: (item) => item.keys, text: (item) => number(item.keys) },
      { title: "at most", number: true, value: (item) => item.max_keys, text: (item) => number(item.max_keys) },
      { title: "bytes", number: true, value: (item) => item.bytes, text: (item) => bytes(item.bytes) },
      { title: "at most ", number: true, value: (item) => item.max_bytes, text: (item) => bytes(item.max_bytes) },
      counted("stored", "stored"),
      counted("removed", "removed"),
      counted("expired", "expired"),
      counted("refused", "refused"),
    ],
    (item) => item.name,
  );
  return new List("Results", "results", made, "There is no results store.");
}
