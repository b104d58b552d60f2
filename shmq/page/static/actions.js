// Buttons that change something. Each shows the command that does the same, and asks.

import { call } from "./door.js";
import { make } from "./format.js";

let asked = null;
let rights = null; // what the server said

/** Whether the server lets this page act. */
export function mayAct() {
  asked ??= call("rights")
    .then((answer) => answer.json())
    .then((said) => {
      rights = said;
      return said.admin;
    })
    .catch(() => false);
  return asked;
}

/** A word of a command as a shell takes it. */
function quoted(word) {
  return /^[\w.@%+=:,/-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`;
}

/** A command line. verbs: after `shmq`; names: its arguments, of which one may begin with a dash. */
export function commandLine({ verbs, names, more = [] }) {
  const end = names.some((name) => name.startsWith("-")) ? ["--"] : [];
  return ["shmq", ...verbs, ...more, ...(rights?.options ?? []), ...end, ...names].map(quoted).join(" ");
}

/** A button; hidden unless the page may act. command: as for commandLine. done(sentence, failed) is
 * called with the outcome. */
export function action(title, wish, command, done) {
  const button = make("button", { type: "button", class: "act", onclick: press }, title);
  const follow = () => {
    button.hidden = !rights?.admin;
    button.title = commandLine(command);
  };
  follow();
  if (!rights) mayAct().then(follow);

  async function press() {
    if (!(await confirmed(title, commandLine(command), button))) return;
    button.disabled = true;
    done(...(await send(wish)));
    button.disabled = false;
  }

  return button;
}

/** Show a command and ask; whether the answer was yes. opener: what gets the focus back. */
export function confirmed(title, line, opener) {
  const yes = make("button", { type: "submit", value: "yes" }, title);
  const dialog = make(
    "dialog",
    { "aria-label": title },
    make(
      "form",
      { method: "dialog" },
      make("p", {}, "This does the same as"),
      make("p", {}, make("code", {}, line)),
      make("p", { class: "tools" }, yes, " ", make("button", { type: "submit", value: "no", autofocus: true }, "Cancel")),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => {
      dialog.remove();
      opener.focus();
      resolve(dialog.returnValue === "yes");
    }),
  );
}

/** Do what is wished. The sentence about it, and whether it failed. */
export async function send(wish) {
  try {
    const answer = await call("act", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(wish),
    });
    const said = await answer.json();
    return [said.done ?? said.error, !answer.ok];
  } catch (error) {
    return [error.message, true];
  }
}
