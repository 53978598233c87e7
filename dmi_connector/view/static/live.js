// The capture of a running request: new rows are requested repeatedly while the tab is visible.

import { ask } from "./api.js";
import { about } from "./header.js";

const $ = (id) => document.getElementById(id);
const PAUSE = 1000;

/** Calls again() one second after `start`, while the tab is visible. */
export class Again {
  constructor(again) {
    Object.assign(this, { again, timer: 0, wanted: false });
    document.addEventListener("visibilitychange", () => { if (this.wanted) this.start(); });
  }

  start() {
    this.stop();
    this.wanted = true;
    if (!document.hidden) this.timer = setTimeout(() => { this.wanted = false; this.again(); }, PAUSE);
  }

  stop() {
    clearTimeout(this.timer);
    this.wanted = false;
  }
}

/** The window to request. For a running request, it has only rows that the page knows. */
export function rangeOf({ first, count, store }) {
  return { first, count: store.running ? Math.min(count, store.tokens - first) : count };
}

/** Why a panel cannot show anything yet; null if it can. */
export function awaited(store) { return store.running && !store.tokens ? "No token is written yet." : null; }

export class Live {
  /** now: what is shown. parts: parts of the page to update. */
  constructor(now, parts) {
    Object.assign(this, { now, parts, store: null, failing: false, again: new Again(() => this.look()) });
  }

  /** Shows the facts about the current capture. Call `next` after drawing it. */
  watch() {
    const { store } = this.now, box = $("running");
    this.stop();
    this.store = store;
    about(store);
    $("place").max = Math.max(0, store.tokens - 1);
    box.hidden = !store.running;
    if (!store.running) return;
    const count = `${store.tokens.toLocaleString("en")} ${store.tokens === 1 ? "token" : "tokens"}`;
    box.textContent = `Running: ${count} so far. More appear as they are written; Verify is for finished captures.`;
  }

  /** Requests new rows in a second, if the capture is running. Call it after drawing: new rows interrupt a drawing. */
  next(store) { if (store === this.store && store.running) this.again.start(); }

  stop() {
    this.store = null;
    this.again.stop();
  }

  async look() {
    const { store } = this;
    const found = await ask("live", "capture", store.name, {}, false).catch((error) => this.failed(store, error));
    if (this.store !== store || !found) return;
    if (this.failing) [this.failing, $("fault").hidden] = [false, true];
    try {
      if (!found.running || found.tokens !== store.tokens) await this.grown(found);
    } finally { this.next(store); }
  }

  /** Handles new rows, or the end of the request. Choices stay. A window that showed the newest token follows it. */
  grown(found) {
    const { now, now: { store }, parts } = this, newest = now.first + now.count >= store.tokens;
    Object.assign(store, found);
    if (store.running) parts.choices.grown();
    else parts.choices.fill(store);
    const last = Math.floor(Math.max(0, store.tokens - 1) / now.count) * now.count;
    if (newest && now.token === null && store.running && last !== now.first) { now.first = last; parts.forgetHeat(); }
    this.watch();
    return parts.show();
  }

  /** Handles the end of a request without a store, or an error of the server. What is drawn stays. */
  failed(store, error) {
    if (this.store !== store) return;
    if (error.status !== 404) { this.failing = true; this.parts.fault(error); this.next(store); return; }
    $("running").textContent = `The request has ended without a store: ${error.message}.`;
  }
}
