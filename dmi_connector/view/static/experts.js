// The experts panel: the first expert of each token, by colour, and how often each expert of a layer was chosen.

import { ask } from "./api.js";
import { bars } from "./bars.js";
import { category, css, short } from "./colour.js";
import { awaited } from "./live.js";
import { Matrix } from "./matrix.js";

const $ = (id) => document.getElementById(id);

export class Experts {
  constructor(page, pick) {
    Object.assign(this, { page, asked: "", layer: 0, data: null });
    this.matrix = new Matrix($("experts"), {
      height: (rows) => Math.min(Math.max(rows * 16, 24), 420),
      pick: (layer, column) => { this.choose(layer); pick(this.first + column, page.store.experts.layers[layer]); },
      tip: (layer, column) => { $("experts-tip").textContent = layer === null || !this.data ? "\u00a0" : this.tip(layer, column); },
    });
  }

  clear() {
    Object.assign(this, { asked: "", data: null });
    this.matrix.show(null);
    $("load").replaceChildren();
    $("load-title").textContent = "";
  }

  async show() {
    const { store, first, count, fault } = this.page;
    const lacks = store.experts ? awaited(store) : "The store has no routing of experts. Capture topk_ids (and topk_weights).";
    [$("experts-box").hidden, $("experts-lacks").hidden] = [lacks, !lacks].map(Boolean);
    $("experts-lacks").textContent = lacks ?? "";
    const asked = JSON.stringify([store.name, first, count, store.tokens]);
    if (lacks || asked === this.asked) { this.paint(); return; }
    Object.assign(this, { asked, first });
    const query = { first, count };
    const ids = await ask("experts", "experts", store.name, query).catch(fault);
    const weights = ids && store.experts.weights ? await ask("weights", "experts", store.name, { ...query, weights: 1 }).catch(fault) : null;
    if (this.asked !== asked || !ids) return;
    this.data = { ids, weights };
    this.layer = Math.max(0, store.experts.layers.indexOf(this.page.layer));
    this.paint();
    this.load();
  }

  choose(layer) {
    if (layer === this.layer) return;
    this.layer = layer;
    this.paint();
    this.load();
  }

  /** Chooses the layer that the controls name, if this layer has experts. */
  follow() {
    const at = this.data ? this.page.store.experts.layers.indexOf(this.page.layer) : -1;
    if (at >= 0) this.choose(at);
  }

  paint() {
    if (!this.data) return;
    const { values, shape: [rows, columns, each] } = this.data.ids;
    const first = new Float32Array(rows * columns);
    for (let i = 0; i < first.length; i++) first[i] = values[i * each];
    $("experts").setAttribute("aria-label", `First expert: ${rows} layers, ${columns} tokens`);
    this.matrix.show({
      values: first, rows, columns, colour: (value) => (Number.isNaN(value) ? null : category(value)),
      rowNames: (at) => String(this.page.store.experts.layers[at]),
      columnName: (column) => (this.first + column).toLocaleString("en"),
      mark: { row: this.layer, column: this.page.token === null ? -1 : this.page.token - this.first }, edge: this.page.edge,
    });
  }

  /** The experts of a token in a layer: [[expert, weight or null], ...]. */
  of(layer, column) {
    const { ids: { values, shape: [, columns, each] }, weights } = this.data, at = (layer * columns + column) * each;
    return Array.from({ length: each }, (_, i) => [values[at + i], weights ? weights.values[at + i] : null]);
  }

  tip(layer, column) {
    const named = this.of(layer, column).map(([expert, weight]) => (weight === null ? `${expert}` : `${expert} (${short(weight)})`));
    const where = `layer ${this.page.store.experts.layers[layer]}, token ${this.first + column} ${this.page.label(column)}`;
    return Number.isNaN(this.of(layer, column)[0][0]) ? `${where}: the store lacks this row` : `${where}: experts ${named.join(", ")}`;
  }

  async load() {
    const { store, fault } = this.page, layer = store.experts.layers[this.layer];
    const found = await ask("load", "load", store.name, { layer }).catch(fault);
    if (!found || this.page.store !== store) return;
    const all = found.counts.reduce((sum, count) => sum + count, 0) || 1;
    $("load-title").textContent = `Load of layer ${layer}, all ${store.tokens.toLocaleString("en")} rows`;
    bars($("load"), found.counts.map((count, expert) => ({
      label: String(expert), value: count, said: `${((100 * count) / all).toFixed(1)} %`, colour: css(category(expert)), title: `expert ${expert}: chosen ${count} times`,
    })));
  }
}
