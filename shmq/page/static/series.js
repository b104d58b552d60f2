// The series that charts show: their names in the data, and on the page.

export const STATES = [
  { label: "ready", name: "ready", colour: "ready" },
  { label: "on disk", name: "disk", colour: "disk" },
  { label: "in flight", name: "in_flight", colour: "flight" },
  { label: "deferred", name: "deferred", colour: "deferred" },
  { label: "leased", name: "leased", colour: "leased" },
];
export const RATES = [
  { label: "in", name: "in", colour: "ready" },
  { label: "out", name: "out", colour: "flight" },
  { label: "finished", name: "finished", colour: "leased" },
  { label: "redelivered", name: "requeued", colour: "bad" },
];
