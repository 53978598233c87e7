// The list of captures. Only lines in view are in the page. A piece of the list is requested when it comes into view.

import { ask } from "./api.js";
import { Again } from "./live.js";

const LINE = 72, PIECE = 100;

export class List {
  constructor(box, spacer, total, open, fault) {
    Object.assign(this, { box, spacer, total, open, fault, search: "", count: 0, at: -1, name: null, pieces: new Map(), again: new Again(() => this.look()) });
    box.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(box);
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.look(); });
    box.addEventListener("click", (event) => {
      const line = event.target.closest(".capture");
      if (line) this.choose(Number(line.dataset.at));
    });
  }

  async find(search) {
    if (search !== this.search) this.box.scrollTop = 0; // if the search continues, the list stays where the user scrolled
    this.search = search;
    this.pieces = new Map();
    const first = await this.load(0, {});
    if (!first || search !== this.search) return;
    this.at = first.captures.findIndex((capture) => capture.name === this.name);
    this.take(first);
    if (first.pending) setTimeout(() => { if (search === this.search) this.find(search); }, 50); // the server continues where it stopped
  }

  /** Applies what an answer says about all captures. */
  take(first) {
    this.count = first.total;
    const pending = first.pending ? `, ${first.pending.toLocaleString("en")} texts to be read` : "";
    this.total.textContent = `${first.total.toLocaleString("en")} ${first.total === 1 ? "capture" : "captures"}${pending}`;
    this.total.title = first.directory;
    this.spacer.style.height = `${this.count * LINE}px`;
    this.draw();
    this.follow(first);
  }

  follow({ running }) { this.running = running; if (running) this.again.start(); else this.again.stop(); }

  /** Requests the piece in view again: while requests are running, and when the tab is shown again. */
  async look() {
    const { search } = this, piece = Math.floor(this.box.scrollTop / LINE / PIECE);
    const query = { search, first: piece * PIECE, count: PIECE, again: 1 };
    const found = await ask("list again", "captures", undefined, query, false).catch(this.fault);
    if (!found || search !== this.search) { if (this.running) this.again.start(); return; }
    const at = found.captures.findIndex((capture) => capture.name === this.name);
    if (at >= 0) this.at = piece * PIECE + at;
    else if (this.at >= 0) this.at += found.total - this.count; // the chosen capture is in another piece
    if (found.total !== this.count) this.pieces = new Map();
    const same = JSON.stringify(this.pieces.get(piece)) === JSON.stringify(found);
    this.pieces.set(piece, found);
    if (same) this.follow(found);
    else this.take(found);
  }

  /** more: parameters of the query. again: the list is shown already, so the server need not read its whole index. */
  load(piece, more = { again: 1 }) {
    if (!this.pieces.has(piece)) {
      const query = { search: this.search, first: piece * PIECE, count: PIECE, ...more };
      const asked = ask(`list ${piece}`, "captures", undefined, query, false).catch(this.fault);
      this.pieces.set(piece, asked);
      asked.then((found) => { if (found) { this.pieces.set(piece, found); this.draw(); } else this.pieces.delete(piece); });
    }
    return this.pieces.get(piece);
  }

  line(at) { return this.pieces.get(Math.floor(at / PIECE))?.captures?.[at % PIECE]; }

  async choose(at) {
    if (at < 0 || at >= this.count) return;
    const search = this.search;
    await this.load(Math.floor(at / PIECE));
    const line = this.line(at);
    if (!line || search !== this.search) return;
    [this.at, this.name] = [at, line.name];
    const top = at * LINE;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    if (top + LINE > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + LINE - this.box.clientHeight;
    this.draw();
    this.open(line.name);
  }

  step(by) { return this.choose(this.at < 0 ? 0 : this.at + by); }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE) - 4);
    const last = Math.min(this.count, Math.ceil((this.box.scrollTop + this.box.clientHeight) / LINE) + 4);
    const lines = [];
    for (let at = first; at < last; at++) {
      const found = this.line(at);
      if (!found) this.load(Math.floor(at / PIECE));
      lines.push(this.element(at, found));
    }
    this.spacer.replaceChildren(...lines);
    this.box.setAttribute("aria-activedescendant", this.at >= first && this.at < last ? `capture-${this.at}` : "");
  }

  element(at, found) {
    const line = document.createElement("div");
    Object.assign(line, { className: "capture", id: `capture-${at}` });
    line.dataset.at = at;
    line.setAttribute("role", "option");
    line.setAttribute("aria-selected", String(found !== undefined && found.name === this.name));
    line.setAttribute("aria-setsize", this.count);
    line.setAttribute("aria-posinset", at + 1);
    line.style.top = `${at * LINE}px`;
    if (found) {
      const [name, sub] = [document.createElement("div"), document.createElement("div")];
      name.textContent = found.key ?? found.name.replace(/\.zarr$/, "");
      line.title = found.name;
      sub.className = "sub";
      const state = found.state === "complete" ? [] : [found.state];
      const began = found.started.slice(0, 16).replace("T", " ");
      line.classList.toggle("lacking", found.state !== "complete");
      sub.textContent = [...state, `${(found.tokens ?? 0).toLocaleString("en")} tokens`, began, found.model].filter(Boolean).join(" · ");
      const said = document.createElement("div");
      said.className = "said";
      said.textContent = found.text;
      line.append(name, said, sub);
    }
    return line;
  }
}
