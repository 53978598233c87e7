// The logit lens of all tokens of the window: how likely each token was at each layer. The server sends the chosen
// token first, then layer by layer.

import { forget, pieces } from "./api.js";
import { drawLegend, scaleOf, short } from "./colour.js";
import { awaited } from "./live.js";
import { Matrix } from "./matrix.js";
import { inLine } from "./text.js";

const $ = (id) => document.getElementById(id);

export class LensMap {
  /** page: what is shown now. pick(row): called for a click on a token. */
  constructor(page, pick) {
    Object.assign(this, { page, asked: "", going: false, places: [], answers: [] });
    this.matrix = new Matrix($("lens-map"), {
      height: (rows) => Math.min(Math.max(rows * 16, 24), 420),
      pick: (place, column) => pick(this.first + column),
      tip: (place, column) => { $("lens-tip").textContent = place === null ? "\u00a0" : this.tip(place, column); },
    });
    $("lens-statistic").addEventListener("change", () => { this.paint(); page.moved(); });
  }

  clear() {
    forget("lens map");
    Object.assign(this, { asked: "", going: false });
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
    Object.assign(this, { asked, first, places: store.places, going: true });
    this.columns = Math.min(count, store.tokens - first);
    this.answers = Array.from(this.places, () => Array(this.columns).fill(null));
    const token = this.page.token === null ? {} : { token: this.page.token };
    const done = await pieces("lens map", "predicted", store.name, { first, count }, token, (piece) => this.fill(piece)).catch(this.page.fault);
    if (this.asked !== asked) return;
    this.going = false;
    if (done === null) this.asked = ""; // after an error, the next call sends the request again
  }

  /** Cancels a request when another panel is shown. `show` sends it again. */
  stop() { if (this.going) this.clear(); }

  /** Adds a piece: tokens from `token` on at one place, or, if place is null, one token at all places. */
  fill({ place, token, logprobs, entropy, best }) {
    const row = this.places.indexOf(place), start = token - this.first;
    logprobs.forEach((logprob, i) => {
      const [at, column] = place === null ? [i, start] : [row, start + i];
      this.answers[at][column] = { logprobs: logprob, entropy: entropy[i], best: best[i] };
    });
    this.paint();
  }

  paint() {
    if (!this.asked || !this.answers.length) return;
    const kind = $("lens-statistic").value, { columns } = this;
    this.values = Float32Array.from(this.answers.flat(), (found) => found?.[kind] ?? NaN);
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
    const found = this.answers[at][column];
    if (!found) return `place ${this.places[at]}: awaited`;
    const token = `${this.places[at]}, token ${this.first + column} ${this.page.label(column)}`;
    if (found.best.id < 0) return `${token}: no prediction`;
    const [logprob, entropy] = [found.logprobs, found.entropy].map(short);
    return `${token}: log-probability ${logprob}, entropy ${entropy}, likeliest ${inLine(found.best.text, found.best.id)}`;
  }
}
