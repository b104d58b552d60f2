// The page: one view at a time, by the part of the address after `#`.

import { Channel } from "./channel.js";
import { enter } from "./door.js";
import { deadLetters, deaths, leases, processes, results } from "./lists.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";
import { Topic } from "./topic.js";

const model = new Model();
const place = document.getElementById("view");
let view = null;

const LISTS = { dead: deadLetters, deaths, leases, processes, results };

function viewOf(hash) {
  const words = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (words[0] === "channel" && words[1]) return new Channel(words[1], words[2] ?? null);
  if (words[0] === "topic" && words[1]) return new Topic(words[1]);
  return Object.hasOwn(LISTS, words[0]) ? LISTS[words[0]]() : new Overview(model);
}

function route() {
  if (location.hash === "#view") return;
  if (location.hash.startsWith("#token=")) return void enter().then(route);
  const had = view !== null;
  view?.close();
  view = viewOf(location.hash);
  place.replaceChildren(view.element);
  if (had) place.focus({ preventScroll: true });
  scrollTo(0, 0);
  for (const link of document.querySelectorAll("nav a"))
    if (link.getAttribute("href") === (location.hash || "#/")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  refresh();
}

function refresh() {
  const { facts, connected, lost } = model;
  const health = document.getElementById("health");
  const trouble = !connected ? [lost] : facts.gone ? [facts.gone] : facts.trouble ?? [];
  health.textContent = trouble.length ? trouble.join("; ") : "OK";
  health.className = trouble.length ? "bad" : "good";
  document.getElementById("instance").textContent = facts.instance ?? "";
  document.title = `${view?.title ?? "shmq"} – ${facts.instance ?? "shmq"}`;
  if (Object.keys(model.columns).length) view?.update();
}

model.lost = "Connecting.";
model.addEventListener("change", refresh);
model.addEventListener("connection", refresh);
addEventListener("hashchange", route);
await enter();
route();
model.connect();
