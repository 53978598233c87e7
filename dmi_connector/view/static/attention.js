// The attention panel: a large matrix of one head, and thumbnails of all heads of the layer.

import { ask } from "./api.js";
import { drawLegend, scaleOf, short } from "./colour.js";
import { Heads } from "./heads.js";
import { awaited } from "./live.js";
import { Matrix } from "./matrix.js";

const $ = (id) => document.getElementById(id);

export class Attention {
  /** pick(row): called for a click. point(rows): marks tokens in the text. changed(): called for another head. */
  constructor(page, { pick, point, changed }) {
    Object.assign(this, { page, point, shown: null });
    this.matrix = new Matrix($("att"), {
      height: (rows, width) => Math.min(width, 460, Math.max(rows * 20, 120)),
      pick: (row) => pick(page.first + row),
      tip: (query, key) => this.hover(query, key),
      down: true,
    });
    this.heads = new Heads($("heads"), {
      pick: (head) => { $("head").value = head; changed(); },
      tip: (words) => { $("att-tip").textContent = words || "\u00a0"; },
      point, label: page.label, fault: page.fault,
    });
  }

  get layer() { return $("att-layer").value; }

  get head() { return $("head").value || 0; }

  /** Why attention cannot be drawn; "" if it can. */
  lacks() {
    const { store } = this.page, { layers, until } = store.attention;
    if (!layers.length) return "The store has no queries and keys. Capture q_rot and k_rot (preset attention), or pattern.";
    return this.page.first < until ? "" : awaited(store) ?? "Rows before this window are not in the store, and attention needs them as keys.";
  }

  clear() {
    this.shown = null;
    this.matrix.show(null);
    this.heads.clear();
    $("att-legend").textContent = "";
  }

  get window() {
    const { first, count, store } = this.page;
    return { layer: this.layer, first, count: Math.min(count, store.attention.until - first) };
  }

  async show() {
    const { page } = this, lacks = this.lacks();
    [$("att").hidden, $("att-tip").hidden, $("att-lacks").hidden] = [lacks, lacks, !lacks].map(Boolean);
    $("att-lacks").textContent = lacks;
    this.shown = null;
    this.matrix.point();
    if (lacks) { this.heads.clear(); return; }
    const query = { ...this.window, head: this.head };
    const found = await ask("attention", "attention", page.store.name, query).catch((error) => { this.clear(); return page.fault(error); });
    if (!found) return;
    this.shown = { ...found, layer: query.layer, head: query.head };
    this.paint();
  }

  /** Shows the thumbnails of the heads of the layer. */
  async showHeads() {
    if (this.lacks()) this.heads.clear();
    else await this.heads.show(this.page.store, this.window, this.head);
  }

  paint() {
    if (!this.shown) return;
    const { page, shown: { values, shape: [rows, stride], layer, head } } = this;
    const scale = { ...scaleOf([0, 1], { from: 0, root: true }), lacking: values.some(Number.isNaN) };
    drawLegend($("att-legend"), scale, " (square root)");
    $("att").setAttribute("aria-label", `Attention of head ${head} in layer ${layer}: ${rows} queries, ${stride - 1} keys`);
    const name = (at) => (page.first + at).toLocaleString("en");
    this.matrix.show({
      values, rows, columns: stride - 1, offset: 1, stride, rowNames: name, columnName: name,
      colour: (value, query, key) => scale.colour(key > query ? 0 : value),
      mark: { row: page.token === null ? -1 : page.token - page.first, column: -1 }, edge: page.edge,
    });
  }

  /** Draws in the colours of the new theme. */
  repaint() {
    this.paint();
    this.heads.repaint();
  }

  hover(query, key) {
    const there = query !== null && this.shown && key <= query, { page } = this;
    $("att-tip").textContent = there ? this.tip(query, key) : "\u00a0";
    if (this.shown) this.point(there ? [page.first + query, page.first + key] : []);
  }

  tip(query, key) {
    const { page, shown: { values, shape: [, stride] } } = this, line = values.subarray(query * stride, (query + 1) * stride);
    const before = page.first ? `; before the window ${short(line[0])}` : "";
    return `token ${page.first + query} ${page.label(query)} to token ${page.first + key} ${page.label(key)}: ${short(line[1 + key])}${before}`;
  }
}
