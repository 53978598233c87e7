// The latents panel: the strongest latents of the chosen token; a histogram and the strongest contexts of one latent.

import { ask } from "./api.js";
import { bars } from "./bars.js";
import { css, inkOn, scaleOf, short } from "./colour.js";
import { inLine } from "./text.js";

const $ = (id) => document.getElementById(id);

export class Latents {
  /** choose(latent): colours the text by a latent. go(name, row): shows a token of a capture. */
  constructor(page, choose, go) { Object.assign(this, { page, choose, go, latent: null }); }

  clear() {
    this.latent = null;
    for (const id of ["latents-title", "latent-title"]) $(id).textContent = "";
    for (const id of ["latents", "histogram", "contexts"]) $(id).replaceChildren();
  }

  /** Shows the strongest latents of the chosen token. */
  async show() {
    const { store, token, fault, query } = this.page, { lacks } = store.latents;
    [$("latents-box").hidden, $("latents-lacks").hidden] = [lacks, !lacks].map(Boolean);
    $("latents-lacks").textContent = lacks ?? "";
    if (lacks) return;
    if (query.hook === "latents" && Number(query.index) !== this.latent) this.one(Number(query.index));
    $("latents-title").textContent = token === null ? `Choose a token for its latents (${store.latents.hook}).` : "Latents of the token";
    if (token === null) { $("latents").replaceChildren(); return; }
    const found = await ask("latents", "latents", store.name, { token }).catch(fault);
    if (!found || this.page.store !== store || this.page.token !== token) return;
    if (!found.latents.length) $("latents-title").textContent = "No latent of the token is active.";
    bars($("latents"), found.latents.map(({ latent, value }) => ({
      label: String(latent), value, chosen: latent === this.latent, pick: () => this.one(latent),
    })));
  }

  /** Shows one latent in the text, and its contexts. */
  async one(latent) {
    const { store, fault, query } = this.page;
    this.latent = latent;
    if (query.hook !== "latents" || Number(query.index) !== latent) this.choose(latent);
    for (const line of $("latents").children) line.firstChild.setAttribute("aria-pressed", String(line.firstChild.textContent === String(latent)));
    $("latent-title").textContent = `Latent ${latent}: reading captures …`;
    const found = await ask("contexts", "contexts", store.name, { latent }).catch(fault);
    if (!found || this.latent !== latent) return;
    const share = found.rows ? (100 * found.active) / found.rows : 0;
    $("latent-title").textContent = `Latent ${latent}: active in ${share.toFixed(1)} % of ${found.rows.toLocaleString("en")} rows of ${found.read.toLocaleString("en")} captures`;
    this.histogram(found);
    $("contexts").replaceChildren(...found.found.map((context) => this.context(context)));
  }

  histogram({ counts, edges }) {
    const most = Math.max(...counts, 1);
    $("histogram").replaceChildren(...counts.map((count, i) => {
      const [line, bar] = ["li", "i"].map((tag) => document.createElement(tag));
      bar.style.height = `${count ? Math.max(2, (100 * count) / most) : 0}%`;
      line.title = `${short(edges[i])} to ${short(edges[i + 1])}: ${count} rows`;
      line.append(bar);
      return line;
    }));
  }

  context({ store, row, value, first, ids, texts, values }) {
    const [line, button, score] = ["li", "button", "small"].map((tag) => document.createElement(tag));
    const scale = scaleOf(values.map((v) => v ?? NaN), { from: 0 });
    button.type = "button";
    button.title = `${store}, row ${row}`;
    button.append(...ids.map((id, i) => {
      const part = document.createElement("span"), rgb = scale.colour(values[i] ?? NaN);
      part.textContent = inLine(texts?.[i], id) + (texts ? "" : " ");
      if (rgb) Object.assign(part.style, { background: css(rgb), color: inkOn(rgb) });
      part.classList.toggle("top", first + i === row);
      return part;
    }));
    button.addEventListener("click", () => this.go(store, row));
    score.textContent = ` ${short(value)}`;
    line.append(button, score);
    return line;
  }
}
