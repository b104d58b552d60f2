// The first view: the instance as a whole, and all queues in a table.

import { Chart, sparkline } from "./chart.js";
import { bytes, channelAddress, compact, duration, make, moment, number } from "./format.js";
import { ask } from "./model.js";
import { RATES, STATES } from "./series.js";
import { table } from "./table.js";

const DAY_EVERY = 60000; // ms between two looks at the last day

export class Overview {
  title = "Overview";
  #model;
  #depth = new Chart("Messages by state", STATES, { stacked: true });
  #rates = new Chart("Messages a second", RATES);
  #oldest = new Chart("Age of the oldest waiting message", [{ label: "oldest", colour: "bad" }], { unit: "seconds" });
  #facts = make("dl", { class: "facts" });
  #table;
  #found = make("span", { class: "quiet", role: "status" });
  #serials = null;
  #day = null;
  #timer = 0;

  constructor(model) {
    this.#model = model;
    const value = (name) => (serial) => model.value(model.rows.get(serial), name);
    const counted = (title, name, text = compact) => ({
      title,
      number: true,
      value: value(name),
      text: (serial) => text(value(name)(serial)),
    });
    this.#table = table(
      "Channels",
      [
        {
          title: "channel",
          value: (serial) => this.#name(serial),
          sign: (serial) => `${this.#name(serial)} ${value("paused")(serial)}`,
          text: (serial) => this.#link(serial),
        },
        {
          title: "last minute",
          sign: (serial) => model.line(serial).join(" "),
          text: (serial) => sparkline(model.line(serial)),
        },
        counted("ready", "ready"),
        counted("disk", "disk"),
        counted("in flight", "in_flight"),
        counted("deferred", "deferred"),
        counted("leased", "leased"),
        counted("oldest", "oldest", duration),
        counted("in/s", "in"),
        counted("out/s", "out"),
        counted("finished/s", "finished"),
        counted("redelivered/s", "requeued"),
        counted("dead", "dead"),
        counted("consumers", "consumers"),
        counted("memory", "memory", bytes),
      ],
      (serial) => serial,
    );
    const filter = make("input", {
      type: "search",
      id: "filter",
      placeholder: "topic or channel",
      oninput: (event) => this.#filter(event.target.value),
    });
    const period = make(
      "select",
      { id: "period", onchange: (event) => this.#choose(event.target.value) },
      make("option", { value: "hour" }, "last hour"),
      make("option", { value: "day" }, "last day"),
    );
    this.element = make(
      "div",
      {},
      this.#facts,
      make("p", { class: "tools" }, make("label", { for: "period" }, "Charts of the "), period),
      make("div", { class: "charts" }, this.#depth.element, this.#rates.element, this.#oldest.element),
      make("p", { class: "tools" }, make("label", { for: "filter" }, "Filter "), filter, " ", this.#found),
      this.#table,
    );
  }

  update() {
    const { facts, serials } = this.#model;
    const history = this.#day ?? this.#model.history;
    this.#depth.show(history.time, STATES.map((each) => history[each.name]));
    this.#rates.show(history.time, RATES.map((each) => history[each.name]));
    this.#oldest.show(history.time, [history.oldest]);
    if (serials === this.#serials) {
      this.#table.refresh();
    } else {
      this.#serials = serials;
      this.#table.items = serials;
      this.#found.textContent = `${number(serials.length)} queues`;
    }
    this.#facts.replaceChildren(...this.#pairs(facts));
  }

  async #choose(period) {
    clearTimeout(this.#timer);
    if (period === "hour") {
      this.#day = null;
    } else {
      this.#day = await ask("history", { period: "minute" }).catch(() => null);
      this.#timer = setTimeout(() => this.#choose("day"), DAY_EVERY);
    }
    this.update();
  }

  close() {
    clearTimeout(this.#timer);
    for (const chart of [this.#depth, this.#rates, this.#oldest]) chart.close();
  }

  #pairs(facts) {
    const supervisor = facts.supervisor;
    if (!supervisor) return [];
    const [used, all] = facts.shm;
    const pairs = {
      supervisor: supervisor.alive
        ? `pid ${supervisor.pid}, since ${moment(supervisor.since * 1000)}`
        : "not running",
      "supervisors so far": number(supervisor.epoch),
      processes: number(facts.processes),
      topics: number(facts.topics),
      "deaths cleared up": number(facts.reaped),
      "queues repaired": number(facts.rebuilt),
      "memory of queues": bytes(facts.memory),
      "/dev/shm": all ? `${bytes(used)} of ${bytes(all)}` : bytes(used),
      "free on disk": bytes(facts.disk_free),
      files: facts.data_path || "–",
    };
    return Object.entries(pairs).map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)));
  }

  #name(serial) {
    const row = this.#model.rows.get(serial);
    const channel = this.#model.value(row, "channel");
    const topic = this.#model.value(row, "topic");
    return channel === null ? `${topic} (no channel yet)` : `${topic}/${channel}`;
  }

  #link(serial) {
    const row = this.#model.rows.get(serial);
    const address = channelAddress(this.#model.value(row, "topic"), this.#model.value(row, "channel"));
    const paused = this.#model.value(row, "paused") ? make("span", { class: "tag" }, "paused") : null;
    return make("span", {}, make("a", { href: address }, this.#name(serial)), paused);
  }

  #filter(text) {
    const wanted = text.trim().toLowerCase();
    this.#table.filter = (serial) => this.#name(serial).toLowerCase().includes(wanted);
  }
}
