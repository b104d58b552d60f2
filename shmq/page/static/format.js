// Numbers, sizes, times and durations as text, and elements made of them.

const count = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** A count, with separators. */
export function number(value) {
  return value === null || value === undefined ? "–" : count.format(value);
}

/** A count or a rate in few characters. */
export function compact(value) {
  if (value === null || value === undefined) return "–";
  return value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value)
    ? value.toFixed(1)
    : short.format(value);
}

/** A number of bytes with a unit. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1024) break;
    value /= 1024;
    unit = larger;
  }
  return `${unit === "B" || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
}

/** A duration in ms as text. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms === 0) return "0";
  if (ms < 1) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 1000) return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A time in ms since 1970 as local date and time. */
export function moment(ms) {
  if (ms === null || ms === undefined) return "–";
  const t = new Date(ms);
  const two = (value) => String(value).padStart(2, "0");
  return (
    `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())} ` +
    `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`
  );
}

/** How long ago a time (ms since 1970) was. */
export function ago(ms) {
  return ms === null || ms === undefined ? "–" : duration(Math.max(Date.now() - ms, 0));
}

/** An element with attributes and children. Text is never read as HTML. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The address of a topic's view. */
export function topicAddress(topic) {
  return `#/topic/${encodeURIComponent(topic)}`;
}

/** The address of a channel's view. channel: null for the backlog. */
export function channelAddress(topic, channel) {
  const words = ["#/channel", encodeURIComponent(topic)];
  if (channel !== null && channel !== undefined) words.push(encodeURIComponent(channel));
  return words.join("/");
}
