// One channel: its numbers, its consumers, who holds what, its messages.

import { action, commandLine, mayAct } from "./actions.js";
import { bodyOf } from "./body.js";
import { histogram } from "./chart.js";
import { ago, bytes, duration, make, moment, number, topicAddress } from "./format.js";
import { Looks } from "./looks.js";
import { ask } from "./model.js";
import { Past } from "./past.js";
import { Settings } from "./settings.js";
import { table } from "./table.js";

export class Channel {
  #place;
  #looks = new Looks(() => this.#look());
  #facts = make("dl", { class: "facts" });
  #settings;
  #latency = make("div");
  #past;
  #consumers;
  #holders;
  #leases;
  #messages;
  #state = "ready";
  #said = make("p", { role: "status", class: "quiet" });
  #body = make("section", { "aria-label": "Body", class: "body", hidden: true });

  constructor(topic, channel) {
    this.#place = { topic, channel };
    this.title = channel === null ? `${topic} (no channel yet)` : `${topic}/${channel}`;
    this.#past = new Past(this.#place);
    this.#consumers = consumersTable();
    this.#holders = this.#messageTable("Who holds what", true);
    this.#leases = leasesTable("Leases");
    this.#settings = new Settings(topic, channel, () => this.#looks.again());
    const terminal = make("code");
    mayAct().then(() => (terminal.textContent = this.#command()));
    this.#messages = this.#messageTable("Messages", false);
    const choice = make(
      "select",
      {
        id: "state",
        onchange: (event) => {
          this.#state = event.target.value;
          this.#looks.again();
        },
      },
      ...["ready", "requeued", "in_flight", "deferred"].map((state) =>
        make("option", { value: state }, state.replace("_", " ")),
      ),
    );
    this.element = make(
      "div",
      {},
      make("h2", {}, this.title),
      make("p", {}, make("a", { href: topicAddress(topic) }, `Topic ${topic}`)),
      this.#looks.error,
      placeActions(topic, channel, (said, failed) => this.#tell(said, failed)),
      this.#said,
      this.#facts,
      this.#past.element,
      this.#latency,
      make("h3", {}, "Consumers"),
      this.#consumers,
      make("h3", {}, "Who holds what"),
      this.#holders,
      make("h3", {}, "Leases"),
      this.#leases,
      make("h3", {}, "Messages in memory"),
      make("p", { class: "tools" }, make("label", { for: "state" }, "State "), choice),
      this.#messages,
      this.#body,
      make("h3", {}, "Settings"),
      this.#settings.element,
      make("p", { class: "quiet" }, "In a terminal: ", terminal),
    );
  }

  update() {}

  close() {
    this.#looks.close();
    this.#past.close();
  }

  #command() {
    const { topic, channel } = this.#place;
    return commandLine({ verbs: ["stat", "--topic", topic, ...(channel === null ? [] : ["--channel", channel])], names: [] });
  }

  #tell(said, failed) {
    this.#said.textContent = said;
    this.#said.className = failed ? "error" : "quiet";
    this.#looks.again();
  }

  async #look() {
    const [found, messages] = await Promise.all([
      ask("channel", this.#place),
      ask("messages", { ...this.#place, state: this.#state, n: 100 }),
      this.#past.look(),
    ]);
    this.#show(found);
    this.#messages.items = messages;
  }

  #show(found) {
    const counts = found.counts;
    const pairs = {
      waiting: number(counts.depth),
      "of them on disk": number(counts.backend_depth),
      "in flight": number(counts.in_flight),
      deferred: number(counts.deferred),
      leased: number(counts.leased),
      "oldest waiting": counts.oldest_age === null ? "–" : duration(counts.oldest_age * 1000),
      published: number(counts.message_count),
      delivered: number(counts.delivered),
      finished: number(counts.finished),
      requeued: number(counts.requeue_count),
      "timed out": number(counts.timeout_count),
      "back from the dead": number(counts.returned),
      expired: number(counts.expired),
      "dead letters": number(counts.dead_lettered),
      dropped: number(counts.dropped + counts.dropped_oldest),
      refused: number(counts.rejected),
      memory: bytes(counts.memory_bytes),
      paused: counts.paused ? "yes" : "no",
    };
    this.#facts.replaceChildren(...entries(pairs));
    this.#settings.show(found.settings);
    this.#consumers.items = found.consumers;
    this.#holders.items = found.holders;
    this.#leases.items = found.leases.map((lease) => ({ ...lease, ...this.#place }));
    const latency = found.latency;
    this.#latency.replaceChildren(
      latency.count
        ? histogram("Time from publish to finish, last minutes", latency.bounds, latency.messages)
        : make("p", { class: "quiet" }, "Nothing was finished in the last minutes."),
    );
  }

  #messageTable(caption, held) {
    const columns = [
      { title: "id", value: (item) => item.id, sign: () => "", text: (item) => this.#open(item) },
      { title: "published", value: (item) => item.published, text: (item) => moment(item.published) },
      { title: "attempts", number: true, value: (item) => item.attempts, text: (item) => number(item.attempts) },
      { title: "size", number: true, value: (item) => item.body.length, text: (item) => bytes(item.body.length) },
    ];
    if (held) {
      columns.push(
        { title: "pid", number: true, value: (item) => item.pid, text: (item) => String(item.pid ?? "–") },
        { title: "command", value: (item) => item.command, text: (item) => item.command ?? "–" },
        { title: "for", number: true, value: (item) => -item.since, text: (item) => ago(item.since) },
        { title: "until", value: (item) => item.until, text: (item) => (item.until === null ? "it is done" : moment(item.until)) },
        { title: "do", sign: (item) => String(item.pid), text: (item) => this.#take(item) },
      );
    } else {
      columns.push(
        { title: "due", value: (item) => item.due, text: (item) => moment(item.due) },
        { title: "body", text: (item) => item.body.text },
      );
    }
    return table(caption, columns, (item) => item.id);
  }

  /** Buttons that take a message from its holder. */
  #take(item) {
    const { topic, channel } = this.#place;
    const more = item.pid === null ? [] : ["--pid", String(item.pid)];
    const buttons = Object.entries({ Requeue: "requeue", Finish: "finish" }).map(([title, verb]) =>
      action(
        title,
        { action: `${verb}_message`, topic, channel, id: item.id, pid: item.pid },
        { verbs: ["message", verb], more, names: [topic, channel, item.id] },
        (said, failed) => this.#tell(said, failed),
      ),
    );
    return make("span", {}, buttons[0], " ", buttons[1]);
  }

  #open(item) {
    const show = (event) => {
      event.preventDefault();
      this.#read(item.id);
    };
    return make("a", { href: "#", onclick: show }, item.id);
  }

  async #read(id) {
    this.#body.hidden = false;
    try {
      const found = await ask("message", { ...this.#place, id });
      const properties = Object.entries(found.properties).map(([key, value]) => `${key}: ${value}`);
      this.#body.replaceChildren(
        make("h4", {}, `Message ${id}`),
        make("p", { class: "quiet" }, `${found.state.replace("_", " ")}, ${bytes(found.body.length)}`),
        ...(properties.length ? [make("pre", { tabindex: "0" }, properties.join("\n"))] : []),
        ...bodyOf(found.body),
      );
    } catch (error) {
      this.#body.replaceChildren(make("p", { class: "error" }, error.message));
    }
    this.#body.scrollIntoView({ block: "nearest" });
  }
}

/** Buttons that pause, unpause, empty and delete a channel, or (channel null) a topic. */
export function placeActions(topic, channel, done) {
  const verbs = { Pause: "pause", Unpause: "unpause", Empty: "empty", Delete: "delete" };
  const kind = channel === null ? "topic" : "channel";
  const names = channel === null ? [topic] : [topic, channel];
  const buttons = Object.entries(verbs).map(([title, verb]) =>
    action(title, { action: `${verb}_${kind}`, topic, channel }, { verbs: [kind, verb], names }, done),
  );
  return make("p", { class: "tools" }, ...buttons.flatMap((button) => [button, " "]));
}

/** Names and values as the children of a `dl`. */
export function entries(pairs) {
  return Object.entries(pairs).map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)));
}

function consumersTable() {
  const counted = (title, name) => ({ title, number: true, value: (item) => item[name], text: (item) => number(item[name]) });
  return table(
    "Consumers",
    [
      { title: "pid", value: (item) => item.pid, text: (item) => String(item.pid) },
      { title: "command", value: (item) => item.command, text: (item) => item.command || "–" },
      { title: "since", value: (item) => item.since, text: (item) => moment(item.since) },
      counted("holds", "in_flight"),
      { title: "may hold", number: true, value: (item) => item.max_in_flight, text: (item) => (item.max_in_flight === null ? "any" : number(item.max_in_flight)) },
      counted("delivered", "delivered"),
      counted("finished", "finished"),
      counted("requeued", "requeued"),
      counted("timed out", "timed_out"),
    ],
    (item) => `${item.pid} ${item.since}`,
  );
}

/** The table of open leases. */
export function leasesTable(caption) {
  const counted = (title, name, text = number) => ({ title, number: true, value: (item) => item[name], text: (item) => text(item[name]) });
  return table(
    caption,
    [
      { title: "channel", value: (item) => `${item.topic}/${item.channel}`, text: (item) => `${item.topic}/${item.channel}` },
      { title: "holder", value: (item) => item.holder, text: (item) => item.holder },
      { title: "pid", number: true, value: (item) => item.pid, text: (item) => String(item.pid ?? "–") },
      counted("messages", "messages"),
      counted("on disk", "on_disk"),
      counted("size", "bytes", bytes),
      counted("parts", "parts"),
      counted("replays", "replays"),
      { title: "for", number: true, value: (item) => -item.since, text: (item) => ago(item.since) },
    ],
    (item) => `${item.topic} ${item.channel} ${item.id}`,
  );
}
