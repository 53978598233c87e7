// Thumbnails of the attention of every head of a layer, with a tip for the cell under the pointer.

import { forget, pieces } from "./api.js";
import { css, scaleOf, short } from "./colour.js";

const SHARES = { from: 0, root: true };

export class Heads {
  /**
   * pick(head): called for a click. tip(text): shows the cell under the pointer, "" for none. point(rows): marks tokens
   * in the text. label(column): the text of a token of the window. fault(error): shows an error.
   */
  constructor(box, { pick, tip, point, label, fault }) {
    Object.assign(this, { box, pick, tip, point, label, fault, asked: "", going: false, heads: [] });
  }

  clear() {
    forget("heads");
    Object.assign(this, { asked: "", going: false });
    this.box.replaceChildren();
    this.heads = [];
  }

  /** store: a store whose attention can be shown. chosen: the head of the large matrix. */
  async show(store, query, chosen) {
    const asked = JSON.stringify([store.name, query]);
    if (asked !== this.asked) {
      this.clear();
      this.asked = asked;
      this.heads = Array.from({ length: store.heads }, (_, head) => this.button(head));
      this.box.replaceChildren(...this.heads.map(({ button }) => button));
      this.mark(chosen);
      this.going = true;
      const done = await pieces("heads", "heads", store.name, query, {}, (piece) => this.fill(piece, query)).catch(this.fault);
      if (this.asked !== asked) return;
      this.going = false;
      if (done === null) this.asked = ""; // after an error, the next call sends the request again
    }
    this.mark(chosen);
  }

  mark(chosen) { this.heads.forEach(({ button, head }) => button.setAttribute("aria-pressed", String(head === Number(chosen)))); }

  button(head) {
    const [button, canvas, name] = ["button", "canvas", "span"].map((tag) => document.createElement(tag));
    button.type = "button";
    button.className = "head";
    name.textContent = head;
    button.setAttribute("aria-label", `Head ${head}`);
    button.append(canvas, name);
    button.addEventListener("click", () => this.pick(head));
    return { head, button, canvas };
  }

  fill({ head, values: text, shape: [rows, columns] }, query) {
    const values = new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
    const entry = Object.assign(this.heads[head], { values, rows, columns, step: Math.ceil(query.count / rows), first: query.first });
    entry.canvas.addEventListener("pointermove", (event) => this.hover(entry, event));
    entry.canvas.addEventListener("pointerleave", () => { this.tip(""); this.point([]); });
    this.paint(entry);
  }

  paint({ canvas, values, rows, columns }) {
    if (!values) return;
    const scale = scaleOf([0, 1], SHARES), pen = canvas.getContext("2d");
    [canvas.width, canvas.height] = [columns, rows];
    const image = pen.createImageData(columns, rows);
    values.forEach((value, i) => { const rgb = scale.colour(value); if (rgb) image.data.set([...rgb, 255], 4 * i); });
    pen.putImageData(image, 0, 0);
  }

  /** Cancels a request when another panel is shown. `show` sends it again. */
  stop() { if (this.going) this.clear(); }

  /** Draws in the colours of the new theme. */
  repaint() { this.heads.forEach((entry) => this.paint(entry)); }

  hover({ head, canvas, values, rows, columns, step, first }, event) {
    const box = canvas.getBoundingClientRect();
    const query = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const key = Math.floor(((event.clientX - box.left) / box.width) * columns);
    if (query < 0 || key < 0 || query >= rows || key >= columns || key > query) { this.tip(""); this.point([]); return; }
    const named = (cell) => step === 1 ? `token ${first + cell} ${this.label(cell)}` : `tokens ${first + cell * step} to ${first + cell * step + step - 1}`;
    const value = short(values[query * columns + key]);
    this.tip(`head ${head}, ${named(query)} to ${named(key)}: ${step === 1 ? "" : "largest "}${value}`);
    this.point([first + query * step, first + key * step]);
  }
}
