// The settings of a channel or topic: a list, and a form for those who may change them.

import { commandLine, confirmed, mayAct, send } from "./actions.js";
import { make } from "./format.js";

let forms = 0;

/** The settings of a place. done() is called after a change. */
export class Settings {
  #place;
  #kind;
  #done;
  #may = false;
  #fields = new Map(); // name -> { input, stored }
  #list = make("dl", { class: "facts" });
  #command = make("code");
  #said = make("p", { role: "status", class: "quiet" });
  #button = make("button", { type: "submit", disabled: true }, "Set");
  #rows = make("div", { class: "fields" });
  #form;
  #id = `settings-${++forms}`;

  constructor(topic, channel, done) {
    this.#place = { topic, channel };
    this.#kind = channel === null ? "topic" : "channel";
    this.#done = done;
    this.#form = make(
      "form",
      {
        class: "settings",
        hidden: true,
        "aria-label": `Settings of the ${this.#kind}`,
        onsubmit: (event) => {
          event.preventDefault();
          this.#set();
        },
        oninput: () => this.#follow(),
      },
      this.#rows,
      make("p", {}, "In a terminal: ", this.#command),
      make("p", { class: "tools" }, this.#button, " ", make("button", { type: "button", onclick: () => this.#reset() }, "Undo")),
      this.#said,
    );
    this.element = make("div", {}, this.#list, this.#form);
    mayAct().then((may) => {
      this.#may = may;
      this.#list.hidden = may;
      this.#form.hidden = !may;
      this.#follow();
    });
  }

  /** The settings that hold now. What somebody is typing stays. */
  show(settings) {
    this.#list.replaceChildren(
      ...settings.map((each) => make("div", {}, make("dt", {}, each.name), make("dd", {}, each.text))),
    );
    for (const each of settings) {
      const field = this.#fields.get(each.name);
      if (!field) {
        this.#rows.append(this.#field(each));
        continue;
      }
      if (field.input.value === field.stored) field.input.value = each.text;
      field.stored = each.text;
    }
    this.#follow();
  }

  #field({ name, text, values, meaning, choices }) {
    const id = `${this.#id}-${name}`;
    const input = choices
      ? make("select", { id, name, "aria-describedby": `${id}-help` }, ...choices.map((word) => make("option", { value: word }, word)))
      : make("input", { id, name, "aria-describedby": `${id}-help`, autocomplete: "off", spellcheck: "false" });
    input.value = text;
    this.#fields.set(name, { input, stored: text });
    return make(
      "div",
      {},
      make("label", { for: id }, name),
      input,
      make("span", { id: `${id}-help`, class: "quiet" }, choices ? meaning : `${values}: ${meaning}`),
    );
  }

  #changed() {
    const pairs = [...this.#fields].map(([name, { input, stored }]) => [name, input.value.trim(), stored]);
    return Object.fromEntries(pairs.filter(([, text, stored]) => text !== stored));
  }

  #line(changed) {
    const { topic, channel } = this.#place;
    const names = channel === null ? [topic] : [topic, channel];
    const words = Object.entries(changed).map(([name, text]) => `${name}=${text}`);
    return commandLine({ verbs: [this.#kind, "set"], names: [...names, ...words] });
  }

  #follow() {
    const changed = this.#changed();
    this.#command.textContent = this.#line(changed);
    this.#button.disabled = !this.#may || Object.keys(changed).length === 0;
  }

  #reset() {
    for (const field of this.#fields.values()) field.input.value = field.stored;
    this.#said.textContent = "";
    this.#follow();
  }

  async #set() {
    const settings = this.#changed();
    if (!(await confirmed("Set", this.#line(settings), this.#button))) return;
    const [said, failed] = await send({ action: "configure", ...this.#place, settings });
    this.#said.textContent = said;
    this.#said.className = failed ? "error" : "quiet";
    if (!failed) for (const [name, text] of Object.entries(settings)) this.#fields.get(name).stored = text;
    this.#done();
  }
}
