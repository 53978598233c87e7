// A second capture next to the first one: the same window, hook, layer and statistic, in the same colours.

import { ask } from "./api.js";
import { Matrix } from "./matrix.js";
import { Text } from "./text.js";

const $ = (id) => document.getElementById(id);

export class Side {
  /** pick(row, layer): called for a click on a token; layer is undefined in the text. */
  constructor(page, pick) {
    Object.assign(this, { page, store: null, heat: null, tokens: null, waits: false });
    this.text = new Text($("side-text"), pick, "side-token");
    this.matrix = new Matrix($("side-heat"), {
      height: (rows) => Math.min(Math.max(rows * 16, 24), 340),
      pick: (layer, column) => pick(page.first + column, layer),
      tip: (layer, column) => { $("side-tip").textContent = layer === null || !this.heat ? "\u00a0" : this.tip(layer, column); },
    });
    $("side-close").addEventListener("click", () => this.close());
  }

  get isOpen() { return this.store !== null; }

  /** yes: whether the next capture that is chosen in the list will be shown here. */
  wait(yes) {
    this.waits = yes;
    $("comparing").hidden = !yes;
    $("compare").setAttribute("aria-pressed", String(yes));
    if (yes) $("list").focus();
  }

  escape() {
    if (this.waits) this.wait(false);
    else if (this.isOpen) this.close();
  }

  async open(name) {
    this.wait(false);
    const store = await ask("side capture", "capture", name).catch(this.page.fault);
    if (!store) return;
    Object.assign(this, { store, heat: null, tokens: null });
    $("side").hidden = false;
    $("side-heat-box").hidden = false;
    $("side-name").textContent = store.attrs.key ?? store.name;
    $("side-name").title = store.name;
    this.page.moved();
    await this.show();
  }

  close() {
    Object.assign(this, { store: null, heat: null, tokens: null });
    for (const id of ["side", "side-heat-box"]) $(id).hidden = true;
    this.text.clear();
    this.matrix.show(null);
    this.page.moved();
    this.page.repaint();
  }

  /** Loads the values that are shown for the first capture. */
  async show() {
    if (!this.isOpen) return;
    const { store, page } = this, { query } = page, hook = store.hooks.find((one) => one.name === query.hook);
    const fits = hook?.statistics.some((one) => one.name === query.statistic);
    this.heat = null;
    $("side-lacks").hidden = Boolean(fits);
    $("side-lacks").textContent = fits ? "" : `This capture has no ${query.hook}, ${query.statistic}.`;
    const range = { first: page.first, count: page.count };
    const [tokens, heat] = await Promise.all([
      ask("side tokens", "tokens", store.name, range).catch(page.fault),
      fits ? ask("side heat", "heat", store.name, { ...query, ...range }).catch(page.fault) : null,
    ]);
    if (this.store !== store || page.first !== range.first) return;
    if (tokens) { this.tokens = tokens; this.text.fill(tokens, store.prompt - store.start); }
    this.heat = heat && { ...heat, hook };
    page.repaint();
  }

  get values() { return this.heat?.values ?? new Float32Array(0); }

  /** The values of the layer with this number, or those of a hook without layers. */
  ofLayer(layer) {
    if (!this.heat) return new Float32Array(0);
    const { values, shape: [, columns], hook } = this.heat, at = hook.layers.length ? hook.layers.indexOf(layer) : 0;
    return at < 0 ? new Float32Array(0) : values.subarray(at * columns, (at + 1) * columns);
  }

  /** text, heat: colour scales over both captures. layer: number of the layer. what: title of the heat map. */
  paint({ text, heat, layer, what }) {
    if (!this.isOpen) return;
    if (!this.heat) { this.text.unpaint(); this.matrix.show(null); $("side-heat-title").textContent = ""; return; }
    const mine = this.ofLayer(layer), { values, shape: [rows, columns], hook } = this.heat;
    if (mine.length && this.tokens?.ids.length === columns) this.text.paint(mine, text, () => "no value");
    $("side-heat-title").textContent = what;
    $("side-heat").setAttribute("aria-label", `${what} of the other capture: ${rows} layers, ${columns} tokens`);
    this.matrix.show({
      values, rows, columns, colour: (value) => heat.colour(value), rowNames: (at) => (hook.layers.length ? String(hook.layers[at]) : ""),
      columnName: (column) => (this.page.first + column).toLocaleString("en"),
      mark: { row: rows > 1 ? hook.layers.indexOf(layer) : -1, column: this.page.token === null ? -1 : this.page.token - this.page.first },
      edge: this.store.prompt - this.store.start - this.page.first,
    });
    this.text.mark(this.page.token);
  }

  tip(layer, column) {
    const { values, shape: [, columns], hook } = this.heat, name = hook.layers.length ? `layer ${hook.layers[layer]}, ` : "";
    return `${name}token ${this.page.first + column}: ${this.page.short(values[layer * columns + column])}`;
  }
}
