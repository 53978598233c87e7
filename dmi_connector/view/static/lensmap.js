// The logit lens of all tokens of the window: how likely each token was to each layer. It comes layer by layer.

import { ask } from "./api.js";
import { drawLegend, scaleOf, short } from "./colour.js";
import { awaited } from "./live.js";
import { Matrix } from "./matrix.js";
import { inLine } from "./text.js";

const $ = (id) => document.getElementById(id);

export class LensMap {
  /** page: what is shown now; pick(row): a click on a token of a place. */
  constructor(page, pick) {
    Object.assign(this, { page, asked: "", places: [], answers: [] });
    this.matrix = new Matrix($("lens-map"), {
      height: (rows) => Math.min(Math.max(rows * 16, 24), 420),
      pick: (place, column) => pick(this.first + column),
      tip: (place, column) => { $("lens-tip").textContent = place === null ? "\u00a0" : this.tip(place, column); },
    });
    $("lens-statistic").addEventListener("change", () => { this.paint(); page.moved(); });
  }

  clear() {
    this.asked = "";
    this.matrix.show(null);
    $("lens-legend").textContent = "";
  }

  async show() {
    const { store, first, count } = this.page;
    const lacks = store.lens ?? (store.places.length ? awaited(store) : "The store has no residual stream.");
    [$("lens-map").hidden, $("lens-tip").hidden, $("lens-map-lacks").hidden] = [lacks, lacks, !lacks].map(Boolean);
    $("lens-map-lacks").textContent = lacks ?? "";
    const asked = JSON.stringify([store.name, first, count]);
    if (lacks || asked === this.asked) { this.paint(); return; }
    Object.assign(this, { asked, first, places: store.places, answers: [] });
    this.columns = Math.min(count, store.tokens - first);
    for (let at = this.places.length - 1; at >= 0; at--) { // the model's own prediction first
      const found = await ask("lens map", "predicted", store.name, { first, count, place: this.places[at] }).catch(this.page.fault);
      if (this.asked !== asked) return;
      if (!found) { this.asked = ""; return; }
      this.answers[at] = found;
      this.paint();
    }
  }

  paint() {
    if (!this.asked || !this.answers.length) return;
    const kind = $("lens-statistic").value, { columns } = this;
    this.values = new Float32Array(this.places.length * columns).fill(NaN);
    this.answers.forEach((found, at) => found[kind].forEach((value, i) => { this.values[at * columns + i] = value ?? NaN; }));
    const scale = scaleOf(this.values, { flipped: kind === "logprobs" });
    drawLegend($("lens-legend"), scale, " nats");
    $("lens-map").setAttribute("aria-label", `Lens, ${kind}: ${this.places.length} places, ${columns} tokens`);
    this.matrix.show({
      values: this.values, rows: this.places.length, columns, colour: (value) => scale.colour(value),
      rowNames: (at) => this.places[at], columnName: (column) => (this.first + column).toLocaleString("en"),
      mark: { row: -1, column: this.page.token === null ? -1 : this.page.token - this.first }, edge: this.page.edge,
    });
  }

  tip(at, column) {
    const found = this.answers[at], best = found?.best[column];
    if (!found) return `place ${this.places[at]}: awaited`;
    const token = `${this.places[at]}, token ${this.first + column} ${this.page.label(column)}`;
    if (best.id < 0) return `${token}: no prediction`;
    const [logprob, entropy] = [found.logprobs, found.entropy].map((values) => short(values[column]));
    return `${token}: log-probability ${logprob}, entropy ${entropy}, likeliest ${inLine(best.text, best.id)}`;
  }
}
