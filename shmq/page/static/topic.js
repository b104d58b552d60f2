// One topic: its channels, and the settings that its later channels begin with.

import { entries, placeActions } from "./channel.js";
import { bytes, channelAddress, make, number } from "./format.js";
import { Looks } from "./looks.js";
import { ask } from "./model.js";
import { Settings } from "./settings.js";
import { table } from "./table.js";

export class Topic {
  #topic;
  #looks = new Looks(() => this.#look());
  #said = make("p", { role: "status", class: "quiet" });
  #facts = make("dl", { class: "facts" });
  #channels;
  #settings;

  constructor(topic) {
    this.#topic = topic;
    this.title = topic;
    this.#channels = channelsTable(topic);
    this.#settings = new Settings(topic, null, () => this.#looks.again());
    this.element = make(
      "div",
      {},
      make("h2", {}, `Topic ${topic}`),
      this.#looks.error,
      placeActions(topic, null, (said, failed) => {
        this.#said.textContent = said;
        this.#said.className = failed ? "error" : "quiet";
        this.#looks.again();
      }),
      this.#said,
      this.#facts,
      make("h3", {}, "Channels"),
      this.#channels,
      make("h3", {}, "Settings"),
      make("p", { class: "quiet" }, "Later channels begin with these. Those that exist keep theirs."),
      this.#settings.element,
    );
  }

  update() {}

  close() {
    this.#looks.close();
  }

  async #look() {
    const found = await ask("topic", { topic: this.#topic });
    this.#facts.replaceChildren(
      ...entries({
        published: number(found.message_count),
        "bytes published": bytes(found.message_bytes),
        channels: number(found.channels.filter((each) => each.channel !== null).length),
        paused: found.paused ? "yes" : "no",
      }),
    );
    this.#channels.items = found.channels;
    this.#settings.show(found.settings);
  }
}

function channelsTable(topic) {
  const counted = (title, name) => ({ title, number: true, value: (item) => item[name], text: (item) => number(item[name]) });
  return table(
    "Channels",
    [
      {
        title: "channel",
        value: (item) => item.channel ?? "",
        sign: () => "",
        text: (item) => make("a", { href: channelAddress(topic, item.channel) }, item.channel ?? "(no channel yet)"),
      },
      counted("waiting", "depth"),
      counted("in flight", "in_flight"),
      counted("deferred", "deferred"),
      { title: "paused", value: (item) => item.paused, text: (item) => (item.paused ? "yes" : "no") },
    ],
    (item) => item.channel ?? "",
  );
}
