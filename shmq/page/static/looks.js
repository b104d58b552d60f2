// A view that asks the server again and again, while it is shown.

import { make } from "./format.js";

const EVERY = 2000; // ms between two looks

/** Calls `look()`, which may throw, now and two seconds after each answer, until `close()`. */
export class Looks {
  error = make("p", { role: "alert", class: "error" }); // says why the last look failed
  #look;
  #timer = 0;
  #closed = false;

  constructor(look) {
    this.#look = look;
    queueMicrotask(() => this.#repeat()); // the view is made first
  }

  close() {
    clearTimeout(this.#timer);
    this.#closed = true;
  }

  /** Look now. */
  async again() {
    try {
      await this.#look();
      this.error.textContent = "";
    } catch (error) {
      this.error.textContent = error.message;
    }
  }

  async #repeat() {
    await this.again();
    if (!this.#closed) this.#timer = setTimeout(() => this.#repeat(), EVERY);
  }
}
