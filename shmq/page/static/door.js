// How this page shows that it may look: by a pass that it was given for a token.
//
// The pass is kept for this tab and this origin, which includes the port. A cookie would be sent to
// all ports of the host, and the server of another user may have one of them.

const KEY = "shmq page";

let trouble = "";
let authorization = null; // of a user of the access file, who has no pass

/** Why the token that was given is not taken; empty: it is, or none was given. */
export function refusal() {
  return trouble;
}

/** The token in this page's address, after `#` or (as older addresses have it) after `?`; else null. */
function given() {
  const found = /^#token=(.*)$/.exec(location.hash);
  if (!found) return new URLSearchParams(location.search).get("token");
  try {
    return decodeURIComponent(found[1]);
  } catch {
    return found[1];
  }
}

/** Take the token out of the address and the history, and have it exchanged for a pass. Whether there was one. */
export async function enter() {
  const token = given();
  if (token === null) return false;
  history.replaceState(null, "", `${location.pathname}#/`);
  const bytes = String.fromCharCode(...new TextEncoder().encode(token));
  try {
    const answer = await fetch("login", { headers: { Authorization: `Bearer ${bytes}` }, cache: "no-store" });
    trouble = answer.ok ? "" : await answer.text();
    const pass = answer.ok ? (await answer.json()).pass : "";
    authorization = answer.ok && !pass ? `Bearer ${bytes}` : null;
    if (pass) sessionStorage.setItem(KEY, pass);
    else sessionStorage.removeItem(KEY);
  } catch (error) {
    trouble = error.message;
  }
  return true;
}

/** As `fetch`, with the pass. */
export function call(path, how = {}) {
  const headers = { ...how.headers, "X-Shmq-Page": sessionStorage.getItem(KEY) ?? "" };
  if (authorization) headers.Authorization = authorization;
  return fetch(path, { ...how, headers, cache: "no-store" });
}
